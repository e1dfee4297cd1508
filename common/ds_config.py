"""DeepSpeed configurations as plain dictionaries: ZeRO 0-3, offload, precision, the hybrid engine, a user's own json.

Every key that changes results is written out, since DeepSpeed's defaults move between versions (gradient clipping and
`check_grad_overflow` both did within 0.19). `ds_keys.py` says of every key of a user's json whether it is heeded.
"""

import difflib
import json
from pathlib import Path

from common.ds_keys import COUNT, DTYPE, FLAGS, KEYS, REMOVED, SECTIONS, SWITCH, rule_of
from common.json_files import parse_json

# Sections inside sections that DeepSpeed has at most, and then some.
_DEEPEST = 8


def stage_inside(zero_stage: int, dtype: str) -> int:
    """The ZeRO stage that DeepSpeed is given for --zero_stage: 1 for 0 in 16 bits, else the same.

    At stage 0 DeepSpeed wraps AdamW for 16 bits in a class that, in bf16, makes a step on zero gradients when it is
    built (weights decay, and Adam's bias corrections are those of the next step) and, in fp16, divides gradients by a
    loss scale that the loss was never multiplied by. Stage 1 gives the numbers that stage 0 should.
    """
    return 1 if zero_stage == 0 and dtype != "fp32" else zero_stage


def build(
    *,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float = 0.0,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    hybrid_engine_tokens: int = 0,
) -> dict:
    """The configuration of one engine, trained or frozen.

    Args:
        zero_stage: 0 whole copies, 1 sharded optimizer states, 2 and gradients, 3 and weights; see `stage_inside`.
        dtype: "fp32", "bf16" or "fp16".
        max_grad_norm: global gradient norm to clip to; 0 for no clipping.
        offload_optimizer, offload_param: keep those shards in host memory.
        hybrid_engine_tokens: longest prompt + response for DeepSpeed's hybrid engine; 0 leaves it off.

    Raises:
        ValueError: offload asked for at a stage that does not shard what is to be moved.
    """
    if offload_optimizer and zero_stage == 0:
        raise ValueError("--offload_optimizer needs --zero_stage 1, 2 or 3: at stage 0 every rank keeps its own states")
    if offload_param and zero_stage != 3:
        raise ValueError(f"--offload_param needs --zero_stage 3, seen {zero_stage}: only stage 3 shards the weights")
    stage = stage_inside(zero_stage, dtype)
    zero = {"stage": stage, "overlap_comm": stage == 3, "contiguous_gradients": True}
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 100_000}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config = {
        # How many micro-batches make one optimizer step is `engine.train_step`'s business, not DeepSpeed's.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        # torch's AdamW everywhere: exact under offload, and nothing is compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if dtype == "bf16":
        # Sums over micro-batches and ranks are in fp32: a bf16 sum loses what is 1/256 of it or less. Stage 1 then has
        # a class of its own, which adds each gradient up and frees it as soon as it is there, if told so.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": stage == 1}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    if dtype == "fp16":
        # Sums stay in fp16: in fp32, and with the optimizer offloaded, DeepSpeed 0.19 keeps an overflow in its sum.
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 200}
    if hybrid_engine_tokens:
        config["hybrid_engine"] = {
            "enabled": True,
            "max_out_tokens": hybrid_engine_tokens,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        }
    return config


# ---- a user's json


def read(path: str | Path) -> dict:
    """A user's DeepSpeed json, as it stands.

    Raises:
        ValueError: it is no json, has a key twice, numbers that are not finite, or no object at the top.
    """
    return parse_json(Path(path).read_bytes(), {})


def merge(ours: dict, theirs: dict, said: dict[str, tuple[object, str]]) -> dict:
    """Lays a user's DeepSpeed json over ours. "auto", and null, mean "as the flags say", as in the HF Trainer.

    Args:
        said: {key, with dots for sections: (value, who says so)} for what flags decide. Such a key that is not in it
            is left out without a look.

    Raises:
        ValueError: a key that a flag decides has another value (names the key, both values and the flag), a key that
            would change what is promised here (and why), or a key that DeepSpeed does not know (and the nearest).
    """
    kept: dict = {}
    for key, value in _leaves(theirs):
        if value is None or value == "auto":
            continue
        _check(key, value, said)
        if rule_of(key) == FLAGS:
            continue
        *sections, name = key.split(".")
        place = kept
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return _lay_over(ours, kept)


def _check(key: str, value, said: dict[str, tuple[object, str]]) -> None:
    rule = rule_of(key)
    seen = f"has {key} {_short(value)}"
    if rule is None and key.split(".")[0] not in REMOVED:
        near = difflib.get_close_matches(key, [*KEYS, *SECTIONS], n=1)
        hint = f"; the nearest is {near[0].removesuffix('.*')!r}" if near else ""
        raise ValueError(f"has {key!r}, which is no key of DeepSpeed{hint}")
    if key in said and not _same(value, said[key][0]):
        raise ValueError(f'{seen}, but {said[key][1]}; change one, or write "auto"')
    if rule == FLAGS and key not in said and key.split(".")[0] in ("optimizer", "scheduler"):
        raise ValueError(f"{seen}, which has no counterpart here; remove it")
    is_kind = {
        SWITCH: lambda: isinstance(value, bool),
        COUNT: lambda: type(value) in (int, float) and value >= 1 and value == int(value),
        DTYPE: lambda: value in ("fp32", "bf16", "fp16"),
    }
    if isinstance(rule, str) and rule in is_kind and not is_kind[rule]():
        raise ValueError(f"{seen}, wanted {rule}")
    if isinstance(rule, tuple) and not any(_same(value, allowed) for allowed in rule[0]):
        wanted = f"wanted {' or '.join(map(_short, rule[0]))}, or no such key" if rule[0] else "remove it"
        raise ValueError(f"{seen}, {wanted}: {rule[1]}")


def _leaves(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """(key with dots, value) of everything that is no section.

    Raises:
        ValueError: a section that is no json object, or a value that is one.
    """
    found = []
    for name, value in config.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, dict)
        if "." in name:
            raise ValueError(f"has {name!r}, which is no key of DeepSpeed; sections are objects, one inside another")
        if key in SECTIONS and not is_section and value not in (None, "auto"):
            raise ValueError(f"has {key} {_short(value)}, wanted a json object")
        if is_section and isinstance(KEYS.get(key), str):
            raise ValueError(f"has {key} {_short(value)}, wanted one value")
        if key.count(".") > _DEEPEST:
            raise ValueError(f"has {key}, a section deeper inside others than any of DeepSpeed")
        inside = is_section and rule_of(f"{key}.*") is not None or key in SECTIONS
        found += _leaves(value, f"{key}.") if is_section and inside else [(key, value)]
    return found


def _same(seen, wanted) -> bool:
    if isinstance(wanted, list):
        return isinstance(seen, list) and len(seen) == len(wanted) and all(map(_same, seen, wanted))
    if isinstance(wanted, tuple):  # names of one thing
        return str(seen).lower() in wanted
    if isinstance(wanted, str):
        return str(seen).lower() == wanted
    return seen == wanted and isinstance(seen, bool) == isinstance(wanted, bool)


def _lay_over(ours: dict, theirs: dict) -> dict:
    merged = dict(ours)
    for key, value in theirs.items():
        merged[key] = _lay_over(ours.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def _short(value) -> str:
    said = value if isinstance(value, str) else json.dumps(value)
    said = said if len(said) <= 60 else f"{said[:57]}..."
    return repr(said) if isinstance(value, str) else said
