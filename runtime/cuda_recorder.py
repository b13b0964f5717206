"""Capturing what a function does on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .graphs import DecodeGraphs, NotCapturableError
from .models.decoder import Decoder, KVPools


class CudaRecorder:
    """Graphs that share one pool of memory: what one has left over, the next ones use, and only one
    of them is to run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.nbytes = 0

    def capture(self, fn: Callable[[], object]) -> Callable[[], object]:
        """See graphs.Recorder. `fn` runs three times: to compile and to choose algorithms, to see
        that it asks the device for nothing, and to be captured."""
        free = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_stream(current)
                fn()
                with _no_waiting():
                    fn()
                # other threads may use the device meanwhile
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    fn()
        except RuntimeError as e:  # out of memory is one of them
            raise NotCapturableError(_first_line(e)) from e
        finally:
            current.wait_stream(self._stream)
        self.nbytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return graph.replay


def cuda_graphs(
    decoder: Decoder, pools: Sequence[KVPools], max_num_seqs: int, max_model_len: int,
    device: torch.device, batch_invariant: bool = False,
) -> DecodeGraphs:  # fmt: skip
    """See DecodeGraphs. They are captured; a bar on standard error shows it after 2 seconds."""
    recorder = CudaRecorder(device)
    graphs = DecodeGraphs(
        decoder, pools, max_num_seqs, max_model_len, device, recorder, batch_invariant
    )
    graphs.capture()
    return graphs


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within: RuntimeError where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
