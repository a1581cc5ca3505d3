"""Ways to have Dynamo trace a model, and to run it meanwhile."""

__all__: list[str] = []
