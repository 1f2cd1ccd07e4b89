"""Towers of several dtypes, and what their training must come to."""
