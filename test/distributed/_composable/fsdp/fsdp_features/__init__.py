"""What the tests of features run, on the release and on this branch."""
