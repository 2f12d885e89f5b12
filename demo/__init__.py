"""The small trained model pair, with the programs that trained, measured and grew it."""
