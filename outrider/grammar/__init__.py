"""Grammars that the output must follow, over llguidance: a compiler for one tokenizer, and where a text stands."""

from outrider.grammar.position import GrammarViolation
from outrider.grammar.state import GrammarCompiler, GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "GrammarViolation"]
