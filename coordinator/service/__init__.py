"""The service behind every API: checks a request, generates, and lists the served models.

`generation_service` is the entry and owns the replica's connections and tasks. `streams` finds streams that another
replica began, `poison_guard` refuses prompts that cost workers, `model_catalog` knows the models, `housekeeping` runs
beside the requests.
"""
