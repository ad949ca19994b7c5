"""Generators write the tokens: clients of engines that are servers of their own."""
