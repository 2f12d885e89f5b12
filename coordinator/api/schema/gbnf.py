"""Grammars in llama.cpp's GBNF, as vLLM's clients also send them, converted to Lark."""

from __future__ import annotations

from outrider.errors import InvalidRequest


def as_lark(grammar: str) -> str:
    """Returns a grammar in llguidance's Lark: the grammar itself, or its conversion if it is GBNF (`root ::= ...`).

    Raises InvalidRequest("grammar") for GBNF that is not valid.
    """
    if "::=" not in grammar:
        return grammar
    # Imported here because llguidance takes 0.5 s to load.
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(grammar):
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises Exception itself for unknown rules
        raise InvalidRequest("grammar", f"the grammar is not valid GBNF: {error}") from error
