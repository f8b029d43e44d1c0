"""Exports on the Hugging Face Hub: the folder as it is, with its model card, under the user's own token."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from gates.errors import GateError, first_line


def push_to_hub(directory: str | os.PathLike[str], repository: str, *, private: bool | None = None) -> str:
    """Upload a directory that an export wrote, of any form, or gates; returns the address of the commit.

    The repository is made if it is not there. Nothing in the directory changes.

    Args:
        directory: what :func:`gates.save_pruned` or :meth:`gates.GatedModel.save_pretrained` wrote.
        repository: its name on the Hub, ``user/name``.
        private: whether a new repository is private; by default as the account has it. One that exists stays as it is.

    Raises:
        GateError: if there is no such directory, the name is none, there is no token, or the Hub refuses or cannot be reached.

    >>> push_to_hub("no/such/folder", "someone/smaller")
    Traceback (most recent call last):
    gates.errors.GateError: 'no/such/folder' is no directory with an export; write one first
    """
    directory = Path(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        raise GateError(f"{str(directory)!r} is no directory with an export; write one first")
    check_can_push(repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload pruned model")
    except Exception as error:  # of the Hub, of the network, or of the token
        raise GateError(
            f"{str(directory)!r} could not be uploaded to {repository!r}: {first_line(error)}; it is complete on this machine, "
            f"and gates.push_to_hub(directory, repository) tries again"
        ) from error
    return str(done)


def check_can_push(repository: str) -> None:
    """Whether a name can be one on the Hub, and whether there is a token; nothing is asked of the network.

    Raises:
        GateError: saying what is missing.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise GateError(f"{repository!r} is no name of a repository on the Hub; expected user/name") from error
    if repository.count("/") != 1:
        raise GateError(f"{repository!r} names no user or organisation; expected user/name")
    if huggingface_hub.get_token() is None:
        raise GateError(f"there is no token to upload to {repository!r} with; log in with hf auth login, or set HF_TOKEN")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise GateError(f"nothing can be uploaded to {repository!r} while HF_HUB_OFFLINE is set; unset it")
