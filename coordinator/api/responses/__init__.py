"""OpenAI's Responses API: its bodies, translated to chats, and its answers, whole or as events. Pure.

`response_body` reads a request and `input_items` its conversation; `response_writer` writes the answer, whose items
`output_items` keeps; `paths` and `response_answers` document both.
"""
