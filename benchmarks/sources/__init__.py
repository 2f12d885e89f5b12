"""Sources of hints beside the shipped draft model: what each of them gains."""
