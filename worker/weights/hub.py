"""hub: fetching a model from the Hugging Face hub, and why that failed, in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.download_progress import bar_for
from legato.worker.weights.quoting import one_line

if TYPE_CHECKING:
    from legato.worker.weights.download_progress import OnDownload

_log = logging.getLogger(__name__)

# Config, tokenizer and weights; never pickles, nor a second copy of the weights.
ALLOWED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
]
IGNORED = ["*/*", "consolidated*"]
# The hub's client would wait for ever for a server that accepts and says nothing.
PROBE_TIMEOUT_S = 10.0
ADVICE = "or give the path of a local folder or .gguf file"


def fetch(repo: str, revision: str | None, on_download: OnDownload | None = None) -> Path:
    """Downloads a model, or finds it in the local cache; returns its folder.

    One bounded request says whether the hub answers. Where it does not, only the cache is used, and
    a log line says so. `on_download`: see `bar_for`; without it the hub's client shows bars. A
    download that has begun gives up a read after HF_HUB_DOWNLOAD_TIMEOUT (10 s).

    Raises:
        CheckpointError: one sentence with the cause and the fix.
    """
    name = repo if revision is None else f"{repo}@{revision}"
    unreachable = _probe(repo, revision)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=ALLOWED,
            ignore_patterns=IGNORED,
            local_files_only=unreachable is not None,
            tqdm_class=None if on_download is None else bar_for(on_download),
        )
    # Whatever goes wrong in there, of the network, the hub or the disk, the user gets a sentence.
    except Exception as error:
        raise CheckpointError(_sentence(name, error, unreachable)) from (unreachable or error)
    if unreachable is not None and not isinstance(unreachable, OfflineModeIsEnabled):
        _log.warning("%s: using the cached copy: %s", name, _first_line(unreachable))
    return Path(folder)


def _probe(repo: str, revision: str | None) -> Exception | None:
    try:
        HfApi().model_info(repo, revision=revision, timeout=PROBE_TIMEOUT_S)
    # Kept, and told to the user if the cache cannot help.
    except Exception as error:
        return error
    return None


def _sentence(name: str, error: Exception, unreachable: Exception | None) -> str:
    if isinstance(error, IncompleteSnapshotError):
        reason = "is only partly in the local cache"
    elif isinstance(error, LocalEntryNotFoundError):
        reason = "is not in the local cache"
    else:
        reason = ""
    cause = unreachable if reason and unreachable is not None else error
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{name} {reason}, and HF_HUB_OFFLINE is set: unset it to download, {ADVICE}"
    if isinstance(cause, GatedRepoError):
        return (
            f"{name} is gated: accept its terms on its page on the hub and log in with "
            f"`hf auth login` (or set HF_TOKEN), {ADVICE}"
        )
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"{name} is neither a local folder or file nor a model on the hub that you may read: "
            f"check the spelling, log in with `hf auth login` if it is private, {ADVICE}"
        )
    if isinstance(cause, RevisionNotFoundError):
        return f"{name} does not exist: the model has no such revision; check its name, {ADVICE}"
    if isinstance(cause, OSError) and not isinstance(
        cause, HfHubHTTPError | LocalEntryNotFoundError
    ):
        return f"{name} cannot be stored: {_first_line(cause)}; free the space or set HF_HOME"
    if reason:
        return (
            f"{name} {reason}, and the hub cannot be reached ({_first_line(cause)}): check the "
            f"network, {ADVICE}"
        )
    return (
        f"{name} cannot be fetched from the hub ({_first_line(cause)}): check the network and try "
        f"again, {ADVICE}"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {one_line(lines[0])}" if lines else type(error).__name__
