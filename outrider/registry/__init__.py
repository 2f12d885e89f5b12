"""The registry in Redis: which workers are alive and which slots are taken.

Reading order: `worker_record` (a worker's description of itself), `registry` (the operations), `scripts` (how Redis
does them), `worker_lease` (keeps one worker's entry alive), `redis_connection` (connects).
"""
