"""The formats in which models write reasoning and tool calls: recognized, forced by a grammar, and parsed. Pure.

In reading order:

    names            names of the formats, as flags have them
    answer_parts     what an answer may consist of, and the pieces that a parser finds
    lark             grammars in llguidance's Lark: literals with special tokens, free text up to a mark
    json_scanner     arguments in JSON, whose end is found in text that arrives in pieces
    xml_arguments    arguments in elements, whose JSON is written as they arrive
    call_syntax      how a format writes calls, as data, and the table of these formats
    call_grammar     their grammar
    call_parser      their parser
    reasoning        formats with marks around the reasoning, and their parser
    harmony          gpt-oss's format, whose channels hold reasoning, content and calls
    output_format    the format of a model: one for calls and one for reasoning, chosen by its chat template

Invariant of every format: the parser reads everything that the grammar permits, and finds the same parts however the
output is split into pieces.
"""
