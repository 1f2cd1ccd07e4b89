"""What the tests of ranks that drift apart run."""
