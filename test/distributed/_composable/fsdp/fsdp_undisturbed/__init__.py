"""What shows that units of one dtype are as in the release."""
