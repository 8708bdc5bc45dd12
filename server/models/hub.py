"""Models from a hub, by id and revision, through the hub's own cache."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider.engine.models.heads.config import head_kind
from outrider.engine.models.weight_files import WeightFileError, indexed_files

from .store import ModelError

# Weights as safetensors only: a pickle checkpoint runs code when it is opened.
_DATA_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*"]
_CODE_FILES = ["*.py"]
_NO_WEIGHTS = ["*/*.safetensors"]  # in folders, copies for other programs: gpt-oss has them
_HEAD_FILES = ["pytorch_model.bin"]  # some heads have nothing else; only tensors are read


def snapshot(
    hub_id: str, revision: str | None, *, with_code: bool = False, cached_only: bool = False
) -> Path:
    """The directory of `hub_id` at `revision`, downloaded if it is not in the hub's cache.

    Raises ModelError, which says whether id, revision, access or network is the problem.
    """
    where = f"{hub_id} at revision {revision}" if revision else hub_id

    def download(patterns: list[str], but_not: list[str] = _NO_WEIGHTS) -> Path:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=but_not,
                local_files_only=cached_only,
            )
        )

    try:
        directory = download(_DATA_FILES + (_CODE_FILES if with_code else []))
        if head_kind(directory) and not any(directory.glob("*.safetensors")):
            directory = download(_DATA_FILES + _HEAD_FILES)
        if in_folders := [file for file in indexed_files(directory) if "/" in file]:
            directory = download(in_folders, but_not=[])
        return directory
    except WeightFileError as error:
        raise ModelError(f"{where} cannot be used: {error}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"access to {hub_id} is restricted: ask for it on the model's page, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub has {hub_id}, but no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {hub_id!r} that you may see; check the spelling, and log in "
            "with `hf auth login` if it is private"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is no hub id: {error}") from error
    except Exception as error:  # whatever the HTTP library that the hub's uses has for a failure
        if cached_only:
            raise ModelError(
                f"{where} is not in the hub's cache on this machine; `outrider models fetch "
                f"{hub_id}` gets it"
            ) from error
        cause = error.__cause__ or error  # of LocalEntryNotFoundError: what went wrong on the way
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise ModelError(
            f"cannot download {where}, and it is not complete in the hub's cache ({reason}); check "
            "the network, or give a local directory"
        ) from error
