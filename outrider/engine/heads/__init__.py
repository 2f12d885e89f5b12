"""Draft heads that others published: small networks that guess from the target's own hidden states.

tensors       the weights of a head's folder, by name
kind          kinds of heads, and how they are recognized
checkpoint    opens a head's folder, and reads the shape of its target
head          what all heads with attention share
eagle3        EAGLE-3 and 3.1
mtp           layers for multi-token prediction, which the target's own checkpoint holds
medusa        Medusa, whose heads do not attend
waves         the order in which rows are run that feed each other
head_engine   runs a head with attention as if it were a draft model
loading       builds them from folders
"""
