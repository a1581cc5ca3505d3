"""The processes of a group: who they are, what each does, and what all do if one fails."""

__all__: list[str] = []
