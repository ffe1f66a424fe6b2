"""Checkpoints that follow a rule, worked out by hand: a target, and drafting heads that foresee it perfectly.

The rule: `VOCAB` ids, of which the `PRIME` live ones stand for the numbers 0, 1, ..., PRIME - 1; the next number is the
sum of the last two, modulo PRIME. A head drafts every position right as long as it is fed what it should be. One step
off anywhere (a hidden state, a token, a position, a KV slot, a layer), and it drafts noise: acceptance falls to chance.

How the weights come about:

- A number's code is a point of a circle for every frequency (`codes`): the code of a sum has the cosine and sine of
  sums of angles, and to multiply all numbers by one is a matrix (`renaming`). A residual stream keeps a few codes, each
  in its own place: CUR, PREV, NEXT, HELD.
- Keys are constant and queries turned by as many positions as a head looks back (`attention`): with RoPE the score
  peaks at exactly that distance. Values are codes.
- The gated MLP multiplies (`Mlp`): silu(g)·u - silu(-g)·u is g·u.
- All codes are equally long, so is every state that a norm sees, and its weights undo it (`norm`). Final norms also
  turn the sign of CUR, so that states before and after them are told apart.
- An EAGLE-like head puts the older operand together from shares: part from its own KV one position back, where the
  token came in, part from the target's hidden state. Each is large noise without the other (`shares`). Two more reads,
  FAR back, add nought as long as the KV there is in step, and noise otherwise.

Prompts are to have `SHORTEST_PROMPT` tokens or more: a head that finds nothing so far back drafts noise. A fault of the
prefill shows in the first `FAR` tokens after it, so short outputs tell most, and any acceptance below 1 is a fault. A
shift of all positions alike is none: RoPE does not see it. Made for float32: scores of attention reach 250.
"""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]

PRIME, VOCAB = 23, 64
# Scattered, so that ids and numbers differ, and the ids' distance from the numbers too; 0, the usual padding, is dead.
LIVE = [1 + 63 * number // PRIME for number in range(PRIME)]
NUMBERS = {token: number for number, token in enumerate(LIVE)}

MAX_LEN = 1024
FAR = 17  # further back than a block of 16 reaches
HERE = -1  # a head that looks one ahead finds its own position, unless a mask or a length shows it what it should not
SHORTEST_PROMPT = FAR + 2

HIDDEN, INTERMEDIATE, HEAD_DIM, KV_HEADS = 128, 144, 32, 2
LAYERS = 4
AUX_LAYERS = [1, 2, 3]  # EAGLE-3 reads what enters these
ROPE_THETA = 10.0  # fast frequencies only: neighbors of the peak, and whatever comes round again, stay far below it
SHARPNESS = 16.0
EPS = 1e-6
DRAFT_HEADS = 8  # of Medusa, unless told; upstream wants as many as tokens are drafted

# ---- the rule ------------------------------------------------------------------------------------------


def next_token(before: int, last: int) -> int:
    return LIVE[(NUMBERS[before] + NUMBERS[last]) % PRIME]


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    """What the target says to a prompt under greedy decoding."""
    tokens = list(prompt[-2:])
    while len(tokens) < length + 2:
        tokens.append(next_token(tokens[-2], tokens[-1]))
    return tokens[2:]


def prompts(amount: int = 4, length: int = SHORTEST_PROMPT, seed: int = 0) -> list[list[int]]:
    """Live tokens at random, every prompt five longer than the one before. Two zeros at the end would breed zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(amount):
        numbers = torch.randint(PRIME, (length + 5 * row,), generator=generator).tolist()
        numbers[-1] = numbers[-1] or 1
        rows.append([LIVE[number] for number in numbers])
    return rows


def accepted(prompt: Sequence[int], output: Sequence[int], k: int, blind: bool = False) -> list[int]:
    """How many drafts a faultless head gets accepted at each position, given what came out, drawn or greedy.

    A last step that the end of the output cuts short is left out. `blind`: the head does not see the newest token and
    takes it to be what the rule says, as Medusa's do.
    """
    counts = [0] * k
    tokens, length = [*prompt, *output], len(prompt) + 1  # the first token comes without drafts
    while length + k < len(tokens):
        drafts = continuation(tokens[: length - 1], k + 1)[1:] if blind else continuation(tokens[:length], k)
        right = next((i for i in range(k) if drafts[i] != tokens[length + i]), k)
        for i in range(right):
            counts[i] += 1
        length += right + 1
    return counts


# ---- codes ---------------------------------------------------------------------------------------------

CIRCLES = (PRIME - 1) // 2
CODE = 2 * CIRCLES  # the cosines, then the sines
ONE = 0  # a constant
CUR, PREV, NEXT, HELD = (slice(1 + CODE * place, 1 + CODE * (place + 1)) for place in range(4))
WORK = slice(HELD.start, HELD.start + 4 * CIRCLES)  # where Medusa's blocks write; HELD is empty by then
assert WORK.stop <= HIDDEN


def codes(numbers: Tensor) -> Tensor:
    """A point of the unit circle for every frequency, per number."""
    angles = numbers[..., None] * torch.arange(1, CIRCLES + 1) * (2 * torch.pi / PRIME)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def renaming(factor: int) -> Tensor:
    """The matrix from the code of any number to the code of its multiple. All numbers' codes are as good as one-hot."""
    numbers = torch.arange(PRIME)
    return codes(numbers * factor % PRIME).T @ codes(numbers) * (2 / PRIME)


def random_turns(amount: int, seed: int) -> list[Tensor]:
    """Orthogonal matrices: they keep the length of a code."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(CODE, CODE, generator=generator))[0] for _ in range(amount)]


def shares(amount: int, seed: int) -> list[Tensor]:
    """Matrices that sum up to one, each three times as large."""
    large = [3 * turn for turn in random_turns(amount - 1, seed)]
    return [*large, torch.eye(CODE) - sum(large)]


def place(rows: slice, matrix: Tensor, columns: slice, width: int = HIDDEN) -> Tensor:
    """A map from one place of an input of `width` to one place of the residual stream."""
    whole = torch.zeros(HIDDEN, width)
    whole[rows, columns] = matrix
    return whole


def constant(width: int) -> Tensor:
    whole = torch.zeros(HIDDEN, width)
    whole[ONE, ONE] = 1.0
    return whole


def norm(amount: int) -> Tensor:
    """Weights that undo the norm of a state of the constant and so many codes."""
    return torch.full((HIDDEN,), ((1 + amount * CIRCLES) / HIDDEN + EPS) ** 0.5)


def turning_norm(amount: int) -> Tensor:
    """The same, but CUR comes out with its sign turned."""
    weights = norm(amount)
    weights[CUR] *= -1
    return weights


def embedding() -> Tensor:
    """CUR, and in HELD the same code under the first of the layers' turns. Dead tokens have no code."""
    table = torch.zeros(VOCAB, HIDDEN)
    table[:, ONE] = 1.0
    live = codes(torch.arange(PRIME))
    table[LIVE, CUR] = live
    table[LIVE, HELD] = live @ layer_turns()[0].T
    return table


def output_head() -> Tensor:
    """Logits: the number in NEXT stands 5.75 above the others, so at temperature 1.5 it is drawn in two of three cases.
    Dead tokens never are."""
    table = torch.zeros(VOCAB, HIDDEN)
    table[:, ONE] = -100.0
    table[LIVE, ONE] = 0.0
    table[LIVE, NEXT] = codes(torch.arange(PRIME)) / 2
    return table


# ---- attention and MLP ---------------------------------------------------------------------------------


def gaze(distance: int) -> Tensor:
    """The query that peaks at a distance, where every key is `gaze(0)`. Halves as in RoPE of NeoX."""
    angles = distance * ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return (SHARPNESS * HEAD_DIM**0.5) ** 0.5 * torch.cat([angles.cos(), -angles.sin()])


Read = tuple[int, Tensor]
"""How far one query head looks back, and the map from the code that it reads into the residual stream."""


def attention(
    sources: Sequence[Tensor], reads: Sequence[Sequence[Read]], heads: int = 2, bias: bool = False
) -> Weights:
    """A KV head per source (the map from the input to a code), each with so many query heads: those of `reads`."""
    width = sources[0].shape[1]
    q, k = torch.zeros(KV_HEADS * heads, HEAD_DIM), gaze(0).repeat(KV_HEADS)
    v = torch.zeros(KV_HEADS, HEAD_DIM, width)
    o = torch.zeros(HIDDEN, KV_HEADS * heads, HEAD_DIM)
    for kv_head, (source, group) in enumerate(zip(sources, reads, strict=True)):
        v[kv_head, :CODE] = source
        for head, (distance, into) in enumerate(group, kv_head * heads):
            q[head] = gaze(distance)
            o[:, head, :CODE] = into
    q = q.flatten()
    weights = {"v_proj.weight": v.flatten(0, 1), "o_proj.weight": o.flatten(1)}
    for name, vector in {"q_proj": q, "k_proj": k}.items():
        weights[f"{name}.weight"] = torch.zeros(len(vector), width)
        if bias:
            weights[f"{name}.bias"] = vector
        else:
            weights[f"{name}.weight"][:, ONE] = vector
    if bias:
        weights["v_proj.bias"] = torch.zeros(KV_HEADS * HEAD_DIM)
    return {f"self_attn.{name}": weight for name, weight in weights.items()}


def read_code(columns: slice, sign: float = 1.0, width: int = HIDDEN) -> Tensor:
    """The source of a KV head: one code of the input."""
    source = torch.zeros(CODE, width)
    source[:, columns] = sign * torch.eye(CODE)
    return source


def write_code(rows: slice, matrix: Tensor) -> Tensor:
    whole = torch.zeros(HIDDEN, CODE)
    whole[rows] = matrix
    return whole


class Mlp:
    """A gated MLP, written unit by unit."""

    def __init__(self) -> None:
        self.gate, self.up = torch.zeros(INTERMEDIATE, HIDDEN), torch.zeros(INTERMEDIATE, HIDDEN)
        self.down = torch.zeros(HIDDEN, INTERMEDIATE)
        self.units = count()

    def linear(self, rows: slice, matrix: Tensor, columns: slice) -> "Mlp":
        """A constant gate makes a unit linear."""
        wide = 4.0
        for row, weights in zip(range(rows.start, rows.stop), matrix, strict=True):
            unit = next(self.units)
            self.gate[unit, ONE] = wide
            self.up[unit, columns] = weights
            self.down[row, unit] = 1 / F.silu(torch.tensor(wide))
        return self

    def sum_codes(self, rows: slice, left: slice, right: slice, sign: float = 1.0) -> "Mlp":
        """The code of a sum: cos cos - sin sin, and sin cos + cos sin. `sign` is what `right` stands under."""
        for circle in range(CIRCLES):
            cos, sin = circle, circle + CIRCLES
            for out, a, b, factor in [(cos, cos, cos, 1), (cos, sin, sin, -1), (sin, sin, cos, 1), (sin, cos, sin, 1)]:
                for half in (1.0, -1.0):
                    unit = next(self.units)
                    self.gate[unit, left.start + a] = half
                    self.up[unit, right.start + b] = sign
                    self.down[rows.start + out, unit] = half * factor
        return self

    def weights(self) -> Weights:
        return {"mlp.gate_proj.weight": self.gate, "mlp.up_proj.weight": self.up, "mlp.down_proj.weight": self.down}


def norms(before_attention: int, before_mlp: int) -> Weights:
    """The two norms of a layer, by the number of codes that each sees."""
    return {"input_layernorm.weight": norm(before_attention), "post_attention_layernorm.weight": norm(before_mlp)}


# ---- the target ----------------------------------------------------------------------------------------


def layer_turns() -> list[Tensor]:
    """How the code in HELD is turned where it enters each layer: the states of layers are told apart."""
    return random_turns(LAYERS, seed=1)


def target_weights(bias: bool = False) -> Weights:
    """Layer 0 fetches the previous token, the last one adds. HELD turns from layer to layer and is empty at the end."""
    turns = [*layer_turns(), torch.zeros(CODE, CODE)]
    weights = {"model.embed_tokens.weight": embedding(), "lm_head.weight": output_head()}
    sources = [read_code(CUR)] * KV_HEADS
    for layer in range(LAYERS):
        reads: list[list[Read]] = [[(1, write_code(PREV, torch.eye(CODE)))] if layer == 0 else [], []]
        mlp = Mlp().linear(HELD, turns[layer + 1] - turns[layer], CUR)
        if layer == LAYERS - 1:
            mlp.sum_codes(NEXT, PREV, CUR)
        parts = attention(sources, reads, bias=bias) | mlp.weights() | norms(2 if layer == 0 else 3, 3)
        weights |= prefixed(f"model.layers.{layer}.", parts)
    weights["model.norm.weight"] = turning_norm(3)
    return weights


def make_target(folder: Path) -> Path:
    return save(folder, target_weights(), llama_config())


# ---- EAGLE and MTP -------------------------------------------------------------------------------------


def older_operand() -> list[list[Read]]:
    """Reads that leave the older token's code in PREV: of the codes that came in as tokens, and as hidden states.

    At a position the newest token came in as a token; the older one as a hidden state, and one back as a token.
    """
    near_token, near_state = shares(2, seed=2)
    (check,) = random_turns(1, seed=3)
    as_tokens = [(1, write_code(PREV, near_token)), (FAR, write_code(PREV, 3 * check))]
    as_states = [(HERE, write_code(PREV, near_state)), (FAR - 1, write_code(PREV, -3 * check))]
    return [as_tokens, as_states]


def make_eagle(folder: Path) -> Path:
    """CUR is the newest token's, as the target's states have it: with its sign turned. HELD is the older one's."""
    fc = constant(2 * HIDDEN)
    fc += place(CUR, -torch.eye(CODE), CUR, 2 * HIDDEN)
    fc += place(HELD, -torch.eye(CODE), second(CUR), 2 * HIDDEN)
    sources = [read_code(CUR, sign=-1), read_code(HELD)]
    layer = attention(sources, older_operand()) | Mlp().sum_codes(NEXT, PREV, CUR, sign=-1).weights()
    layer["post_attention_layernorm.weight"] = norm(3)  # EAGLE has no norm before attention
    return save(folder, {"fc.weight": fc} | prefixed("layers.0.", layer), llama_config(num_hidden_layers=1))


def make_mimo(folder: Path) -> Path:
    """Its MTP layer takes the state from before the target's last norm, ahead of the token; queries come by biases."""
    project = constant(2 * HIDDEN)
    project += place(CUR, torch.eye(CODE), second(CUR), 2 * HIDDEN)
    project += place(HELD, torch.eye(CODE), CUR, 2 * HIDDEN)
    sources = [read_code(CUR), read_code(HELD)]
    layer = attention(sources, older_operand(), bias=True) | Mlp().sum_codes(NEXT, PREV, CUR).weights() | norms(2, 3)
    layer |= {"token_layernorm.weight": norm(2), "hidden_layernorm.weight": norm(3), "input_proj.weight": project}
    # What goes out looks like the target's states: without HELD.
    layer["final_layernorm.weight"] = norm(4)
    layer["final_layernorm.weight"][HELD] = 0.0
    weights = target_weights(bias=True) | prefixed("model.mtp_layers.0.", layer)
    # Not "mimo", for which transformers would want code from the checkpoint: the architecture decides.
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return save(folder, weights, llama_config(**config))


def make_eagle3(folder: Path) -> Path:
    """The older token's code comes as shares from three layers, and drafts are numbers, not ids.

    The residual stream is the hidden state: CUR is the older token's until attention puts the newest one's there, and
    what is in PREV and NEXT has to go again. NEXT of the first state is a stopgap of the right length.
    """
    width = 3 * HIDDEN
    fc = constant(width) + place(NEXT, torch.eye(CODE), CUR, width)
    for part, (share, aux_layer) in enumerate(zip(shares(3, seed=4), AUX_LAYERS, strict=True)):
        fc += place(CUR, share @ layer_turns()[aux_layer].T, shifted(HELD, part), width)

    as_tokens, as_states = older_operand()
    as_tokens.append((HERE, write_code(CUR, torch.eye(CODE))))
    as_states.append((HERE, write_code(CUR, -torch.eye(CODE))))
    sources = [read_code(CUR, width=2 * HIDDEN), read_code(second(CUR), width=2 * HIDDEN)]
    mlp = Mlp().sum_codes(NEXT, PREV, CUR)
    for used in (PREV, NEXT):
        mlp.linear(used, -torch.eye(CODE), used)
    layer = attention(sources, [as_tokens, as_states], heads=4) | mlp.weights() | norms(2, 3)
    layer["hidden_norm.weight"] = norm(2)

    weights = prefixed("midlayer.", layer) | {"fc.weight": fc, "norm.weight": turning_norm(2)}
    weights["lm_head.weight"] = output_head()[LIVE]
    weights["d2t"] = torch.tensor(LIVE) - torch.arange(PRIME)
    weights["t2d"] = torch.tensor([token in NUMBERS for token in range(VOCAB)])
    config = dict(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        num_attention_heads=4 * KV_HEADS,
        draft_vocab_size=PRIME,
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS,
    )
    return save(folder, weights, llama_config(**config))


def second(columns: slice) -> slice:
    return shifted(columns, 1)


def shifted(columns: slice, parts: int) -> slice:
    """The same place in a later part of several states side by side."""
    return slice(columns.start + parts * HIDDEN, columns.stop + parts * HIDDEN)


# ---- Medusa --------------------------------------------------------------------------------------------


def make_medusa(folder: Path, heads: int = DRAFT_HEADS) -> Path:
    """Head i adds u times the older token and v times the newest one, u and v being Fibonacci's numbers."""
    weights: Weights = {}
    u, v = 1, 2
    for head in range(heads):
        block, readout = medusa_head(u, v)
        weights |= {f"blocks.{head}.layers.0.weight": block, f"lm_heads.{head}.weight": readout}
        u, v = v, u + v
    config = dict(
        architectures=["MedusaModel"], model_type="medusa", hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=heads
    )
    return save(folder, weights, config | {"num_hidden_layers": 1})


def medusa_head(u: int, v: int) -> tuple[Tensor, Tensor]:
    """A block adds angles by squares: |e^ia + e^-ib|² = 2 + 2 cos(a + b), and with e^i(π/2 - b) the sine.

    silu(g) - g/2 is g²/4 for small g. The block's units go to empty places; the readout takes g/2 off, and the 2.
    """
    small = 0.1
    a, b = torch.zeros(CODE, HIDDEN), torch.zeros(CODE, HIDDEN)
    a[:, PREV], b[:, CUR] = renaming(u % PRIME), -renaming(v % PRIME)  # the last norm turned CUR
    (cos_a, sin_a), (cos_b, sin_b) = a.split(CIRCLES), b.split(CIRCLES)
    roots = small * torch.cat([cos_a + cos_b, cos_a + sin_b, sin_a - sin_b, sin_a + cos_b])
    block = torch.zeros(HIDDEN, HIDDEN)
    block[WORK] = roots

    squares = torch.zeros(2 * CODE, HIDDEN)
    squares[:, WORK] = torch.eye(2 * CODE)
    squares = (squares - roots / 2) * 4 / small**2
    sums = (squares[:CODE] + squares[CODE:]) / 2
    sums[:, ONE] -= 1.0
    readout = torch.zeros(VOCAB, HIDDEN)
    readout[LIVE] = codes(torch.arange(PRIME)) @ sums
    return block, readout


# ---- files ---------------------------------------------------------------------------------------------


def llama_config(**overrides: object) -> dict[str, object]:
    config: dict[str, object] = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    return config | overrides


def prefixed(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: weight for name, weight in weights.items()}


def save(folder: Path, weights: Weights, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # A copy each: safetensors refuses tensors that share memory.
    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


HEADS = {"eagle": make_eagle, "eagle3": make_eagle3, "mtp": make_mimo, "medusa": make_medusa}
