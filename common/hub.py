"""Uploading a finished model folder to the Hugging Face hub, with a model card that says how it was made."""

import dataclasses
from pathlib import Path

from common import checkpoint
from common.cli import is_main_process
from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Hub:
    """Whether and where to upload; `hub_model_id` None: the name of the output folder under the account in use."""

    push_to_hub: bool
    hub_model_id: str | None


def check(hub: Hub) -> None:
    """Asks the hub who we are, before training is paid for; on the main process only.

    Raises:
        UserError: no network or no valid token, with what to do.
    """
    if hub.hub_model_id and not hub.push_to_hub:
        raise UserError("--hub_model_id says where, but nothing is uploaded without --push_to_hub")
    if not hub.push_to_hub or not is_main_process():
        return
    from huggingface_hub import HfApi, errors

    try:
        HfApi().whoami()
    except errors.OfflineModeIsEnabled as error:
        raise UserError("--push_to_hub while HF_HUB_OFFLINE=1 says not to use the network; drop one of them") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError("--push_to_hub needs an account: run `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # the client's transport has errors of its own, under no common name
        raise UserError(f"--push_to_hub: the hub does not answer or refuses the token: {_line(error)}") from error


def push(hub: Hub, folder: Path, say) -> None:
    """Uploads the files that `stage.json` lists and a card, in one commit. `stage.json` stays here: it holds paths.

    A failure is said and does not end the run: the folder is finished and can be uploaded by hand.
    """
    if not hub.push_to_hub:
        return
    from huggingface_hub import CommitOperationAdd, HfApi

    record = checkpoint.read_stage(folder)
    try:
        api = HfApi()
        repo = api.create_repo(hub.hub_model_id or folder.name, exist_ok=True).repo_id
        operations = [CommitOperationAdd(name, str(folder / name)) for name in record["files"]]
        operations.append(CommitOperationAdd("README.md", _card(record).encode()))
        done = api.create_commit(repo, operations, commit_message=f"{record['stage']} model")
        say(f"uploaded to {done.repo_url}")
    except Exception as error:  # whatever it is: the model is finished, and hours of training are not lost to an upload
        say(f"warning: not uploaded: {_line(error)}; by hand: hf upload {hub.hub_model_id or folder.name} {folder}")


def _card(record: dict) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    is_scalar = record["stage"] in ("reward", "rlhf-critic")
    base = record["parents"].get("model") or record["parents"].get("actor")
    is_hub_name = not Path(base["path"]).is_absolute()
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if is_scalar else "text-generation",
        base_model=base["path"] if is_hub_name else None,
        tags=["rlhf", record["stage"]],
    )
    numbers = {k: v for k, v in record["args"].items() if isinstance(v, int | float) and not isinstance(v, bool)}
    table = "\n".join(f"| `{name}` | {value} |" for name, value in sorted(numbers.items()))
    figures = "\n".join(f"| `{name}` | {value} |" for name, value in sorted(record["metrics"].items()))
    return str(
        ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# {record['stage']} model\n\nTrained by Four-Step RLHF, seed "
            f"{record['seed']}.\n\n| figure at the end | |\n|---|---|\n{figures}\n\n| setting | |\n|---|---|\n{table}\n"
        )
    )


def _line(error: Exception) -> str:
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {words}"
