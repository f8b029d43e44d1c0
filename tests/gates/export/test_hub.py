"""What is uploaded, and what is said where nothing can be."""

import huggingface_hub
import pytest

import gates
from gates.errors import GateError
from gates.export import hub
from gates.export.checkpoint import save_pruned
from tests.models import build, random_mask


class Api:
    """The Hub, as far as an upload needs it."""

    repositories = {}

    def create_repo(self, repo_id, private=None, exist_ok=False):
        assert exist_ok
        self.repositories.setdefault(repo_id, {"private": private, "files": {}})

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.repositories[repo_id]["files"] |= files
        return f"https://hub/{repo_id}/commit/1"


class Refusing(Api):
    def create_repo(self, repo_id, private=None, exist_ok=False):
        raise OSError("403 Forbidden: you may not write here\nmore lines")


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token_of_this_test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Api, "repositories", {})
    monkeypatch.setattr(hub, "HfApi", Api)


@pytest.fixture
def export(tmp_path):
    return save_pruned(build("bert"), tmp_path / "out", random_mask("bert"), tokenizer=None)


@pytest.mark.parametrize("private", [True, None])
def test_the_whole_directory_is_uploaded(export, online, private):
    assert gates.push_to_hub(export, "someone/smaller", private=private) == "https://hub/someone/smaller/commit/1"
    repository = Api.repositories["someone/smaller"]
    assert repository["private"] is private
    assert repository["files"] == {path.name: path.read_bytes() for path in export.iterdir()}
    assert {"modeling_pruned.py", "model.safetensors", "README.md"} <= repository["files"].keys()


@pytest.mark.parametrize("name", ["smaller", "a/b/c", "some one/smaller", "", "someone/.."])
def test_a_name_that_is_none_is_refused(export, online, name):
    with pytest.raises(GateError, match="expected user/name"):
        gates.push_to_hub(export, name)


def test_without_a_token_nothing_is_tried(export, online, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(GateError, match=r"no token for an upload to 'someone/smaller'; log in .* HF_TOKEN"):
        gates.push_to_hub(export, "someone/smaller")
    assert Api.repositories == {}


def test_offline_nothing_is_tried(export, online, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GateError, match="HF_HUB_OFFLINE"):
        gates.push_to_hub(export, "someone/smaller")


def test_what_the_hub_refuses_is_one_sentence(export, online, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", Refusing)
    with pytest.raises(GateError, match=r"could not be uploaded .* 403 Forbidden.*directory is complete") as caught:
        gates.push_to_hub(export, "someone/smaller")
    assert "\n" not in str(caught.value)
