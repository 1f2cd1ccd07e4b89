"""What the tests of what else torch has run over sharded towers."""
