"""`quantize serve`: a model over OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from ...kernels.errors import UserError
from ..sizes import parse_size
from .cache_options import (
    SemanticCache,
    SemanticCacheEntries,
    SemanticCacheMemory,
    SemanticCacheModel,
    SemanticCacheTtl,
    check_cache,
)
from .common import model_path
from .common_options import (
    AsyncScheduling,
    BatchInvariant,
    CudaGraphs,
    Device,
    Dtype,
    HeadBits,
    LinearKernel,
    ServedModel,
    Speculate,
)
from .generate import guesser_of
from .replica_options import RayAddress, Replicas, check_replicas, run_server
from .tracing_option import TracesEndpoint, check_endpoint

if TYPE_CHECKING:
    from ...runtime import LLM
    from ...runtime.scheduling.config import Policy

_ENGINE, _LIMITS, _ACCESS = "Engine", "Limits", "Access and logs"


def serve(
    model: ServedModel,
    host: Annotated[str, typer.Option(help="0.0.0.0 for every address of this machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any that is free; the log says which.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="What requests call the model; its folder's name if not said."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv: Annotated[
        str, typer.Option(help="Format of the KV cache: int8, int4, ..., model: none, auto.")
    ] = "auto",
    max_num_seqs: Annotated[
        int, typer.Option(help="Continuations that run at once.", rich_help_panel=_ENGINE)
    ] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and output together.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Of a step of the model.", rich_help_panel=_ENGINE)
    ] = 2048,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="For keys and values, as 2GB; a share of the free memory if not said.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(help="Compute what prompts have in common once.", rich_help_panel=_ENGINE),
    ] = True,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="In place of --kv-memory: the share of a GPU's memory in use with them.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help="fcfs: as they come; priority: requests with a lower `priority` first, which may"
            " take the place of running ones.",
            rich_help_panel=_ENGINE,
        ),
    ] = "fcfs",
    speculate: Speculate = None,
    batch_invariant: BatchInvariant = False,
    linear_kernel: LinearKernel = None,
    head_bits: HeadBits = None,
    cuda_graphs: CudaGraphs = True,
    async_scheduling: AsyncScheduling = True,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3, none; auto: as its chat"
            " template says.",
            rich_help_panel=_ENGINE,
        ),
    ] = "auto",
    max_queue: Annotated[
        int, typer.Option(help="Continuations that may wait; more: 503.", rich_help_panel=_LIMITS)
    ] = 128,
    queue_timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for a turn; longer: 503.", rich_help_panel=_LIMITS),
    ] = 60.0,
    max_body: Annotated[
        str, typer.Option(help="Of a request; larger: 413.", rich_help_panel=_LIMITS)
    ] = "4MB",
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longer: 422.", rich_help_panel=_LIMITS)
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Asked for more: 422.", rich_help_panel=_LIMITS)
    ] = None,
    rate_limit: Annotated[
        int | None,
        typer.Option(
            help="Requests a minute for each key, or address; more: 429.", rich_help_panel=_LIMITS
        ),
    ] = None,
    client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for a client to send, or to read, before it is left.",
            rich_help_panel=_LIMITS,
        ),
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for what runs after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 30.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A key on each line, one of which requests must bring; the variable"
            " LOWBIT_API_KEY is one, too.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page's origin that may ask (repeat).", rich_help_panel=_ACCESS),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option(
            "--log-prompts", help="Prompts and answers go into the log.", rich_help_panel=_ACCESS
        ),
    ] = False,
    otlp_traces_endpoint: TracesEndpoint = None,
    semantic_cache: SemanticCache = None,
    semantic_cache_model: SemanticCacheModel = None,
    semantic_cache_entries: SemanticCacheEntries = 1024,
    semantic_cache_memory: SemanticCacheMemory = "64MB",
    semantic_cache_ttl: SemanticCacheTtl = 3600.0,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
) -> None:
    """Serve a model to clients of OpenAI's interface, until Ctrl-C or SIGTERM.

    Example: quantize serve ./smollm2-w4, then any such client with base_url
    http://127.0.0.1:8000/v1
    """
    from ...runtime.server.keys import read_api_keys
    from ...runtime.server.settings import ServerSettings

    check_endpoint(otlp_traces_endpoint)
    check_replicas(replicas, ray_address, device)
    folder = model_path(model).absolute()  # replicas have another working directory
    settings = ServerSettings(
        model_name=name or Path(model).resolve().name, host=host, port=port,
        api_keys=read_api_keys(api_key_file), max_queue=max_queue, queue_timeout=queue_timeout,
        max_body_bytes=parse_size(max_body, "--max-body"), max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens, rate_limit=rate_limit, client_timeout=client_timeout,
        drain_timeout=drain_timeout, cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts, tool_parser=tool_parser,
        otlp_traces_endpoint=otlp_traces_endpoint, semantic_cache=semantic_cache,
        semantic_cache_model=semantic_cache_model, semantic_cache_entries=semantic_cache_entries,
        semantic_cache_bytes=parse_size(semantic_cache_memory, "--semantic-cache-memory"),
        semantic_cache_ttl=semantic_cache_ttl,
    )  # fmt: skip
    check_cache(settings, replicas)

    guesser, policy = guesser_of(speculate), as_policy(scheduling_policy)
    kv_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    if kv_bytes is not None and gpu_memory_utilization is not None:
        raise UserError("--kv-memory and --gpu-memory-utilization say the same: give one of them")
    _check_engine(device, dtype, kv, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization)
    _check_length(folder, max_model_len)

    def load() -> LLM:
        from ...runtime import LLM

        return LLM(
            folder, device, dtype, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            kv_cache_dtype=kv, max_num_batched_tokens=max_num_batched_tokens, kv_memory=kv_bytes,
            enable_prefix_caching=prefix_caching, speculate=guesser,
            batch_invariant=batch_invariant, gpu_memory_utilization=gpu_memory_utilization,
            scheduling_policy=policy, linear_kernel=linear_kernel, head_bits=head_bits,
            cuda_graphs=cuda_graphs,
            async_scheduling=async_scheduling,
        )  # fmt: skip

    run_server(
        settings, load, replicas, ray_address, folder=folder, device=device, kv_memory=kv_bytes,
        max_num_seqs=max_num_seqs,
    )  # fmt: skip


def _check_engine(
    device: str,
    dtype: str,
    kv: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_share: float | None,
) -> None:
    """UserError for what no model can run with: said before the server listens, not after."""
    import torch

    from ...kernels.device import resolve_device
    from ...runtime.kv_pools import kv_memory_within
    from ...runtime.placement import resolve_dtype
    from ..kv_names import kv_spec_from_name

    for option, value, least in (
        ("--max-num-seqs", max_num_seqs, 1),
        ("--max-num-batched-tokens", max_num_batched_tokens, max_num_seqs),
    ):
        if value < least:
            why = " as --max-num-seqs is, for each takes a token a step" if least > 1 else ""
            raise UserError(f"{option} must be at least {least}{why}, got {value}")
    resolve_dtype(dtype, resolve_device(device), torch.float32, [])
    if gpu_share is not None:
        kv_memory_within(gpu_share, resolve_device(device))
    if kv not in ("auto", "model"):
        kv_spec_from_name(kv)


def as_policy(name: str) -> Policy:
    from ...runtime.scheduling.config import Policy

    if name not in get_args(Policy):
        raise UserError(
            f"--scheduling-policy must be {' or '.join(get_args(Policy))}, got '{name}'"
        )
    return cast("Policy", name)


def _check_length(folder: Path, asked: int | None) -> None:
    """UserError where the model's context is shorter."""
    from ..checkpoint.load import Checkpoint

    if asked is None:
        return
    config = Checkpoint(folder).transformers_config().get_text_config(decoder=True)
    own = getattr(config, "max_position_embeddings", None)
    if asked < 2 or (own is not None and asked > own):
        raise UserError(f"--max-model-len must be from 2 to the model's {own}, got {asked}")
