"""The small trained model pair, how it was made, measured, and grown."""
