"""The policy side, and the one place where agent meets environment. Speaks tokens."""
