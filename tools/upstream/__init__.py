"""The series: mixed units as small edits of the release's own files, for upstream."""
