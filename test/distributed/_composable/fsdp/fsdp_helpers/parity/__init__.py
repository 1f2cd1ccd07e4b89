"""What the tests of parity with the release, and of mixed units, share."""
