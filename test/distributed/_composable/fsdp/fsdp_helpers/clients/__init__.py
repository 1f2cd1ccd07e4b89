"""Training of real models: the examples', and with other people's stacks."""
