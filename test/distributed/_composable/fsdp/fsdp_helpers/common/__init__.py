"""What the tests of several concerns share."""
