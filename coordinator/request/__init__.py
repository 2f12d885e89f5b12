"""One request while it runs.

Begin with `sequence`, the state machine of one output sequence. `sequence_events` and `sequence_actions` are its input
and output; it consults `target_choice`, `sequence_losses` and `retry_policy`. `sequence_runner` is the shell around it,
`attempt` one session at one target (`target_call`) with its draft worker (`draft_link`). `choices` runs a request's
sequences side by side, `request_record` reports on the request.
"""
