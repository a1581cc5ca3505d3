"""Real processes joined by gloo over loopback, which run functions they are sent."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist


class Ranks:
    """Processes that start once and serve many calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Its processes are forked from one that has imported what they need, which takes seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["inlay.observers", "torch.distributed", "inlay.engine.calibrate", "torch._dynamo"]
        )
        port = _free_port()
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], per_rank: list[Any], *, but: int | None = None
    ) -> list[Any]:
        """Call `function(argument)` on every rank at the same time; errors come back as values.

        :param but: a rank that will not live to answer
        """
        assert len(per_rank) == self.size
        for pipe, argument in zip(self._pipes, per_rank, strict=True):
            pipe.send((function, argument))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if rank == but:
                continue
            assert pipe.poll(60), "a rank did not answer within a minute"
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(30)


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    while (call := pipe.recv()) is not None:
        function, argument = call
        try:
            pipe.send(function(argument))
        except Exception as error:
            pipe.send(error)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
