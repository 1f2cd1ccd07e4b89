"""Stand-ins for streams, operators and collectives, and the calls that order them."""
