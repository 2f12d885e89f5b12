"""A corpus of chat templates, tokenizer folders and conversations, for comparison with transformers."""
