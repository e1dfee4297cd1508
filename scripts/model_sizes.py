"""Sizes of models by their configuration alone, and where the folders of a recipe come from: for scripts/plan.py."""

import functools
import os
import socket
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import torch
from huggingface_hub import constants, try_to_load_from_cache

from common import chat_format, models
from common.errors import UserError
from common.memory import Shape
from common.printing import printable


class Lineage:
    """Which model is behind each folder: one that a command has yet to write stands for what it is made from.

    Args:
        commands: parsed flags of steps 1 to 3, in the order in which they will run.
    """

    def __init__(self, commands: list):
        self.parents: dict[str, str] = {}
        self.templates: dict[str, str | None] = {}  # what --chat_template says where a model is first read
        self.known: dict[tuple[str, bool], Shape] = {}
        self.downloads: dict[str, float] = {}  # hub name -> bytes that are not in the cache
        for command in commands:
            if hasattr(command, "model_name_or_path"):
                made = {command.output_dir: command.model_name_or_path}
            elif hasattr(command, "actor"):
                roles = ("actor", "critic")
                made = {f"{command.output_dir}/{role}": getattr(command, role) for role in roles}
            else:
                continue
            for folder, parent in made.items():
                self.templates.setdefault(self.root(parent), command.chat_template)
                self.parents[os.path.normpath(folder)] = parent

    def root(self, path: str) -> str:
        """The folder or hub name that is there already."""
        while not (Path(path) / "config.json").exists() and os.path.normpath(path) in self.parents:
            path = self.parents[os.path.normpath(path)]
        return path

    def shape(self, path: str, scalar: bool, trust_remote_code: bool) -> Shape:
        """The sizes of a language model or, with `scalar`, of a reward model made from it."""
        key = self.root(path), scalar
        if key not in self.known:
            if not Path(key[0]).exists():
                without_waiting()
            self.known[key], weight_bytes = read_shape(*key, trust_remote_code)
            if not Path(key[0]).exists() and not is_cached(key[0]):
                self.downloads[key[0]] = weight_bytes * self.known[key].parameters
        return self.known[key]

    def check_same_tokens(self, actor: str, critic: str, trust_remote_code: bool) -> None:
        """Refuses now what step 3 would refuse after two stages, or would train on badly.

        The critic reads the actor's tokens as they are. So does a reward model of the same tokenizer and template.

        Raises:
            UserError: the two models have other tokenizers or other chat templates.
        """
        actor, critic = self.root(actor), self.root(critic)
        if actor == critic:
            return
        ours, theirs = (models.load_tokenizer(path, trust_remote_code) for path in (actor, critic))
        if not theirs.get_vocab().items() <= ours.get_vocab().items():
            raise UserError(
                f"{critic} has another tokenizer than {actor}, whose tokens its critic has to read; take two models of "
                "one family"
            )
        chat_format.ensure_template(ours, self.templates.get(actor))
        chat_format.ensure_template(theirs, self.templates.get(critic))
        if ours.chat_template != theirs.chat_template:
            raise UserError(
                f"{critic} has another chat template than {actor}: it would learn to judge one format and be shown "
                "another; take two models of one family, or give both folders the same chat_template.jinja"
            )


@functools.cache
def without_waiting(seconds: float = 5.0) -> None:
    """Where the hub cannot be reached, asks it nothing: its client tries for half a minute, for each file."""
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=seconds).close()
    except (OSError, ValueError):
        constants.HF_HUB_OFFLINE = True
        print(
            printable(f"note: {constants.ENDPOINT} does not answer; of the hub only the cache counts"), file=sys.stderr
        )


def read_shape(path: str, scalar: bool, trust_remote_code: bool) -> tuple[Shape, int]:
    """A model's sizes, its parameters counted on a model without storage, and the bytes of one weight as it is stored.

    Raises:
        UserError: no configuration could be read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    try:
        config = models.read_config(path, trust_remote_code)
    except UserError as error:
        raise UserError(
            f"{error}; give a local folder, or go online, or for a gated model accept its terms and run `hf auth login`"
        ) from error
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    if scalar:
        config.num_labels = 1
    text = config.get_text_config()
    stored = getattr(text, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    sizes = [parameter.numel() for parameter in model.parameters()]  # tied weights once
    widths = [getattr(text, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    heads = text.num_attention_heads
    shape = Shape(
        parameters=sum(sizes),
        largest=max(sizes),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=next((width for width in widths if width), 4 * text.hidden_size),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
    )
    return shape, stored.itemsize


def is_cached(name: str) -> bool:
    """Whether a hub model's weights are in the cache."""
    files = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
