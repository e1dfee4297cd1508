"""Chat templates of published models, where there are any: what is trained of six conversations, by another oracle.

`RLHF_TEMPLATES` names a folder of jinja files, such as `trl/chat_templates` in TRL's wheel (`pip download trl
--no-deps`, unzipped). A file NAME_training.jinja beside NAME.jinja has {% generation %} marks around what TRL trains.

What has to hold is known without our code. The text of ids is the template's own, as plain transformers renders it, up
to the end of the last answer, but for the EOS put in where it prints nothing that ends a turn (GLM 4). Each trained
stretch is one answer: its content, before it at most what the template prints between its own header and the content,
after it at most what the template prints up to its turn end; and where marks say so, it lies within them. Else the row
has to be set aside, or the template refused, each with a reason.
"""

import os
import re
from pathlib import Path

import pytest
import small_tokenizers as small

from common import chat_format as cf
from common.errors import UserError

FOLDER = os.environ.get("RLHF_TEMPLATES")
needs_templates = pytest.mark.skipif(not FOLDER, reason="RLHF_TEMPLATES names no folder of chat templates")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
NAMES = [path.stem for path in FILES if not path.stem.endswith("_training")]

FROST = {"name": "frost", "description": "Temperature of a town.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FROST}]
ASKED, SAID = {"role": "user", "content": "Which bread?"}, {"role": "assistant", "content": "Rye, of course."}
CONVERSATIONS = {
    "one turn": ([ASKED, SAID], None),
    "two turns": (
        [ASKED, SAID, {"role": "user", "content": "And why?"}, {"role": "assistant", "content": "It keeps."}], None,
    ),
    "system": ([{"role": "system", "content": "You sell bread."}, ASKED, SAID], None),
    "tools": (
        [{"role": "user", "content": "Frost in Turku?"}, {"role": "assistant", "content": "call frost"},
         {"role": "tool", "content": "minus three"}, {"role": "assistant", "content": "Yes, three below."}], TOOLS,
    ),
    "greeting": ([{"role": "assistant", "content": "Good morning."}, ASKED, SAID], None),
    "thought": ([ASKED, SAID | {"content": "<think>\nhm, toast\n</think>\n\nRye, of course."}], None),
}  # fmt: skip

# The EOS of the models that bring these; of the others <|im_end|>.
EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>", "gemma4": "<turn|>",
    "diffusion": "<turn|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi3": "<|endoftext|>",
    "glm4": "<|endoftext|>", "muse": "<|eot|>", "idefics": "<end_of_utterance>", "smolvlm": "<end_of_utterance>",
    "llava": "</s>",
}  # fmt: skip
# Markers of a turn, as these templates write them.
MARKER = re.compile(r"<\|[^|<>\s'\"]+\|>|<｜[^<>\s'\"]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|</?think>|<(?:start|end)_of_\w+>")


def tokenizer_of(name: str, template: str):
    eos = next((eos for start, eos in EOS.items() if name.startswith(start)), "<|im_end|>")
    special = dict.fromkeys(["<bos>", *sorted(set(MARKER.findall(template))), eos])
    tokenizer = small.characters(tuple(special), bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, messages, tools):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def wrong(tokenizer, messages, tools, spans) -> str | None:
    """What is wrong with these spans."""
    text, whole = "".join(piece for piece, _ in spans), rendered(tokenizer, messages, tools)
    if tokenizer.eos_token not in whole and cf.turn_end_id(tokenizer) == tokenizer.eos_token_id:
        text = text.replace(tokenizer.eos_token, "")
    if not whole.startswith(text):
        return "the text is not the template's"
    contents = [m["content"] for m in messages]
    trained = [piece for piece, is_trained in spans if is_trained]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if not 1 <= len(trained) <= len(answers) or not spans[-1][1]:
        return "not one stretch for each trained answer, the last of them at the end"
    # A generation prompt may have the beginning of the answer: its opening tag, or an empty thought.
    for piece, content in zip(trained, answers[-len(trained) :], strict=True):
        bare = content.split("</think>")[-1].strip()
        if bare not in piece or any(other.strip() in piece for other in contents if other != content):
            return f"{piece!r} is not {content!r}"
        if "toast" in content and "toast" not in piece:
            return "the thought is lost in silence"
        before, _, after = piece.partition(bare)
        if re.search(r"[a-z]", re.sub(r"<\W*\w+\W*>|think|hm, toast|final|to=user|thought", "", before)):
            return f"{before!r} is trained in front of an answer"
        if not MARKER.fullmatch(after.strip()[-len(tokenizer.eos_token) :]) and not MARKER.search(after):
            return f"{after!r} ends no turn"
    asked = "".join(piece for piece, is_trained in spans if not is_trained)
    if any(
        m["content"] not in asked and f'"{m["content"]}"' not in asked for m in messages if m["role"] != "assistant"
    ):
        return "a turn is missing from the context"
    return None


def within_marks(name: str, tokenizer, messages, tools, spans) -> bool | None:
    """Whether the last answer lies within TRL's marks; None where its training template prints another text."""
    path = Path(FOLDER) / f"{name}_training.jinja"
    if not path.exists() or "{%" not in path.read_text(encoding="utf-8"):
        return None
    marked = tokenizer_of(name, path.read_text(encoding="utf-8"))
    try:
        if rendered(marked, messages, tools) != rendered(tokenizer, messages, tools):
            return None
        theirs = marked.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
        )
    except Exception:
        return None
    stretches = re.findall("1+", "".join(map(str, theirs["assistant_masks"])))
    if not stretches:
        return None
    ids = [i for i, m in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if m][-len(stretches[-1]) :]
    # The last stretch of theirs may have the header in front and a newline after the turn end.
    return spans[-1][0].removesuffix(tokenizer.eos_token) in marked.decode(ids)


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_every_span_is_right_or_set_aside_with_a_reason(name):
    tokenizer = tokenizer_of(name, (Path(FOLDER) / f"{name}.jinja").read_text(encoding="utf-8"))
    cells = {}
    try:
        cf.ensure_template(tokenizer, None)
    except UserError as error:
        print(f"\n{name:24} refused at the start: {error!s:.150}")
        return
    for what, (messages, tools) in CONVERSATIONS.items():
        try:
            spans = cf.trained_spans(tokenizer, messages, tools)
        except cf.RowError as error:
            cells[what] = f"aside ({error.reason}{': ' + error.detail[:60] if 'refuses' in error.reason else ''})"
            continue
        fault = wrong(tokenizer, messages, tools, spans)
        if fault is None and (marks := within_marks(name, tokenizer, messages, tools, spans)) is False:
            fault = "outside of the marks"
        cells[what] = f"WRONG: {fault}" if fault else "right" + (", marks agree" if marks else "")
        if tools and not fault and cf.leaves_out(tokenizer, messages, tools):
            assert FROST["description"] not in rendered(tokenizer, messages, tools)
            cells[what] += ", tools not printed: counted"
        elif tools and not fault:
            assert FROST["description"] in rendered(tokenizer, messages, tools)
    print(f"\n{name:24} " + "; ".join(f"{what}: {cell}" for what, cell in cells.items()))
    assert not [cell for cell in cells.values() if cell.startswith("WRONG")]
