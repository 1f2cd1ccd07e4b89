"""What the tests of the build and of the tools share."""
