"""Anthropic's Messages API: its bodies, translated to chats, its answers, whole or as events, and its errors. Pure.

`message_body` reads a request and `conversation` its messages; `message_writer` writes the answer, whose blocks
`content_blocks` keeps; `errors` has the form of errors; `paths` and `message_answers` document all of it.
"""
