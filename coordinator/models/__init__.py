"""The models that clients may ask for: each with its own tokenizer, formats, grammars and draft models.

`served_model` is one of them, with its grammar compilers in `model_grammars`. `model_table` finds them by name.
`models_file` reads them from a file that may change at any time; `open_models` gives what the settings name.
"""
