"""The pipeline: layer interception, tape, replicas, turnstiles and the runtime. Knows torch, not Lightning."""
