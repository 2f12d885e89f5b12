"""The process beside an engine that speaks gRPC with draft workers.

It attaches the engine's open requests to draft workers, as a coordinator would (`attachments`), and serves
outrider.v1.Hints to them, as a target worker does (`outrider.engines.engine_bridge`). It ends with its engine.
"""
