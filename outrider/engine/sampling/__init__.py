"""From logits to tokens, for both kinds of worker: parameters, randomness, sampling, verification of hints."""
