"""nagjax models in PyTorch, for AutoModelForCausalLM(..., trust_remote_code=True): the forward pass and the loss.

This file travels in every bundle that `nagjax export --format bundle` writes, and needs torch and transformers alone.
Parameters keep nagjax's names and layouts: linear maps are [in, out], blocks are stacked along the first axis. There
is no key/value cache, and no Mixture-of-Depths: such bundles are for `nagjax.load`. A calibrated model runs all tokens.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

NOT_RETURNED = ("output_hidden_states", "output_attentions")


class NagjaxConfig(PretrainedConfig):
    """config.json of a bundle; `nagjax` holds the run's settings and the shapes of its parameters."""

    model_type = "nagjax"

    def __init__(self, nagjax: dict | None = None, **kwargs):
        self.nagjax = nagjax or {"config": {}, "parameters": {}, "progress": 1.0, "indices": []}
        super().__init__(**kwargs)


def unit(x: Tensor, epsilon: float) -> Tensor:
    """float32, of unit RMS."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


class PreNorm:
    """The residual of the pre-norm schemes: (h, what the next branch reads)."""

    epsilon = 1e-6

    def __init__(self, options: dict, progress: float):
        self.options, self.progress = options, progress
        self.epsilon = options.get("epsilon", self.epsilon)

    def scale(self, reader: int) -> float:
        return 1.0

    def normalise(self, h: Tensor, entry: dict, reader: int) -> Tensor:
        return (self.scale(reader) * entry["gain"].float() * unit(h, self.epsilon)).to(h.dtype)

    def open(self, embedding: Tensor, entry: dict, ends: dict, reader: int):
        return embedding, self.normalise(embedding, entry, reader)

    def read(self, stream):
        return stream[1]

    def write(self, h: Tensor, update: Tensor, gate: dict) -> Tensor:
        return h + update

    def advance(self, stream, update: Tensor, gate: dict, entry: dict, index: int, reader: int):
        h = self.write(stream[0], update, gate)
        return h, self.normalise(h, entry, reader)

    def close(self, stream, ends: dict):
        return stream[1], torch.zeros(())

    def head_rows(self, table: Tensor) -> Tensor:
        return table


class LNS(PreNorm):
    def scale(self, reader: int) -> float:
        return ((reader + 1) // 2) ** -0.5 if reader else 1.0


class Review(PreNorm):
    epsilon = 1e-5

    def write(self, h, update, gate):
        if "down" in gate:
            products = ((x @ gate["down"][i].to(x)) @ gate["up"][i].to(x) for i, x in enumerate((h, update)))
        else:
            products = (x @ gate[name].to(x) for name, x in (("state", h), ("update", update)))
        z = gate["bias"]
        for product, x in zip(products, (h, update), strict=True):
            z = z + product.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.epsilon)
        return (h.float() + torch.sigmoid(z) * update.float()).to(h.dtype)


class Highway(PreNorm):
    convex = False

    def write(self, h, update, gate):
        opened = torch.sigmoid((h @ gate["weight"].to(h)).float() + gate["bias"])
        return ((1.0 - opened if self.convex else 1.0) * h + opened * update).to(h.dtype)


class HighwayConvex(Highway):
    convex = True


class LayerNorm(PreNorm):
    epsilon = 1e-5

    def normalise(self, h, entry, reader):
        centred = h.float() - h.float().mean(-1, keepdim=True)
        return (entry["gain"] * unit(centred, self.epsilon) + entry["bias"]).to(h.dtype)


class Parallel(LayerNorm):
    def advance(self, stream, update, gate, entry, index, reader):
        h = stream[0] + update
        return h, self.normalise(stream[0] if index % 2 else h, entry, reader)


class Reordered(PreNorm):
    """The stream is (h,)."""

    def open(self, embedding, entry, ends, reader):
        return (embedding,)

    def read(self, stream):
        return stream[0]

    def advance(self, stream, update, gate, entry, index, reader):
        return (stream[0] + self.normalise(update, gate, 0),)

    def close(self, stream, ends):
        return self.normalise(stream[0], ends, 0), torch.zeros(())


class NAG(PreNorm):
    """The stream is (direction, log norm)."""

    tiny = 1e-12

    def open(self, embedding, entry, ends, reader):
        wide = embedding.float() - embedding.float().mean(-1, keepdim=True)
        rms = torch.sqrt(wide.square().mean(-1) + 1e-30)
        return (wide / rms[..., None]).to(embedding.dtype), rms.log() + ends["encode"]

    def read(self, stream):
        return stream[0]

    def advance(self, stream, update, gate, entry, index, reader):
        direction, log_norm = stream
        opened = torch.sigmoid((direction @ gate["weight"].to(direction)).float() + gate["bias"])
        mixture = (opened @ gate["logits"].float().softmax(0)).clamp(min=1e-6)
        ramp = self.options["ramp"]
        alpha = gate["alpha"].float() * (min(self.progress / ramp, 1.0) if ramp else 1.0)
        turn = alpha * mixture ** F.softplus(gate["beta"].float())
        r, u = direction.float(), update.float()
        u = u - u.mean(-1, keepdim=True)
        across = unit(u - (u * r).mean(-1, keepdim=True) * r, self.tiny)
        turned = unit(r + turn[..., None] * across, self.tiny)
        return turned.to(direction.dtype), log_norm + 0.5 * torch.log1p(turn.square())

    def close(self, stream, ends):
        direction, log_norm = stream
        return direction, log_norm + ends["decode"] - math.log(direction.shape[-1])

    def head_rows(self, table):
        wide = table.float()
        return unit(wide - wide.mean(-1, keepdim=True), self.tiny)


SCHEMES = {
    "plain": PreNorm,
    "lns": LNS,
    "review": Review,
    "highway": Highway,
    "highway_convex": HighwayConvex,
    "layer_norm": LayerNorm,
    "parallel": Parallel,
    "reordered": Reordered,
    "nag": NAG,
    "nag_harmonic": NAG,
}


def linear(x: Tensor, own: dict, name: str) -> Tensor:
    product = x @ own[name].to(x)
    return product + own[f"{name}_bias"].to(x) if f"{name}_bias" in own else product


def frequencies(half: int, base: float, rope: dict) -> Tensor:
    plain = base ** (-torch.arange(half, dtype=torch.float32) / half)
    if rope["scaling"] == "none":
        return plain
    if rope["scaling"] == "linear":
        return plain / rope["factor"]
    turns = rope["original"] * plain / (2 * math.pi)
    kept = ((turns - rope["low"]) / (rope["high"] - rope["low"])).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope["factor"]


class NagjaxForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits, and the next-token loss where labels are given (-100: not counted)."""

    config_class = NagjaxConfig
    base_model_prefix = ""
    _tied_weights_keys = None

    def __init__(self, config: NagjaxConfig):
        super().__init__(config)
        own = config.nagjax["config"]
        self.settings, scheme = own["model"], own["scheme"]
        if scheme["name"] not in SCHEMES:
            raise ValueError(f"the adapter has no scheme {scheme['name']!r}; it has {sorted(SCHEMES)}")
        mod = self.settings["mod"]
        if any(any(mod[f"{kind}_rate"] or mod["rate"]) for kind in mod["skip"].split(",")):
            raise ValueError("the adapter has no Mixture-of-Depths: open this bundle with nagjax.load")
        self.scheme = SCHEMES[scheme["name"]](scheme, config.nagjax["progress"])
        for path, shape in config.nagjax["parameters"].items():
            *folders, name = path.split(".")
            inner = self
            for folder in folders:
                if not hasattr(inner, folder):
                    inner.add_module(folder, nn.Module())
                inner = getattr(inner, folder)
            inner.register_parameter(name, nn.Parameter(torch.empty(shape)))
        # Gates, whatever dtype is asked of from_pretrained; bundles of earlier versions do not name them.
        self._keep_in_fp32_modules_strict = set(config.nagjax.get("float32", ()))
        self.post_init()

    def _init_weights(self, module):
        pass

    def _own(self, path: str, block: int | None = None) -> dict:
        """Parameters right below a path, of one block."""
        inner = self
        for name in path.split("."):
            inner = getattr(inner, name, None)
        own = dict(inner.named_parameters(recurse=False)) if inner is not None else {}
        return own if block is None else {name: value[block] for name, value in own.items()}

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, H, Dh]."""
        block = self.settings["block"]
        count = int(x.shape[-1] * block["rotated"])
        half = count // 2
        angle = positions[..., None, None].float() * frequencies(half, self.settings["rope_base"], block["rope"]).to(
            x.device
        )
        cos, sin = (block["rope"]["attention"] * turn for turn in (angle.cos(), angle.sin()))
        x1, x2 = x[..., :half].float(), x[..., half:count].float()
        turned = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)
        return torch.cat([turned, x[..., count:]], -1)

    def _vectors(self, x: Tensor, own: dict, name: str, positions: Tensor) -> Tensor:
        """Queries or keys, normalised and turned: [B, T, H, Dh]."""
        model, block = self.settings, self.settings["block"]
        width = block["head_width"] or model["width"] // model["heads"]
        flat = linear(x, own, name)
        heads = flat.unflatten(-1, (-1, width))
        if model["qk_norm"]:
            vectors = flat if block["qk_gain"] == "row" else heads
            vectors = unit(vectors, block["qk_epsilon"]).to(x.dtype)
            if f"{name}_gain" in own:
                vectors = vectors * own[f"{name}_gain"].to(x.dtype)
            heads = vectors.reshape(heads.shape)
        return self._rotated(heads, positions) if model["positions"] == "rotary" else heads

    def _attention(self, x: Tensor, own: dict, positions: Tensor, mask: Tensor) -> Tensor:
        q, k = (self._vectors(x, own, name, positions) for name in ("query", "key"))
        v = linear(x, own, "value").unflatten(-1, (-1, q.shape[-1]))
        group = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), *(y.repeat_interleave(group, 2).transpose(1, 2) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return linear(mixed.transpose(1, 2).flatten(2), own, "out")

    def _mlp(self, x: Tensor, own: dict) -> Tensor:
        kind, up = self.settings["mlp"], linear(x, own, "up")
        if kind in ("swiglu", "geglu"):
            gate = linear(x, own, "gate")
            return linear((F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * up, own, "down")
        if kind == "relu":
            return linear(F.relu(up), own, "down")
        return linear(F.gelu(up, approximate="tanh" if kind == "gelu" else "none"), own, "down")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **others,
    ):
        """num_items_in_batch: what the loss' sum over targets is divided by, as transformers' Trainer gives it to
        models whose forward takes any keywords; None: the number of targets here. Raises ValueError for `position_ids`
        of several texts in a row: they would see each other; for a mask that is not [B, T]; and for what is not
        computed here: hidden states, attentions, and embeddings in the place of tokens."""
        for name in NOT_RETURNED:
            asked = others.get(name)
            if getattr(self.config, name, False) if asked is None else asked:
                raise ValueError(f"{name}: the adapter returns logits alone; nagjax.load opens what is inside")
        if input_ids is None:
            raise ValueError("input_ids: give the tokens; the adapter takes no embeddings in their place")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            shapes = f"{list(attention_mask.shape)}, the tokens are {list(input_ids.shape)}"
            raise ValueError(f"attention_mask is {shapes}: give one of their shape, 1 for text and 0 for padding")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real = real.bool()
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        if position_ids is not None and not (position_ids == positions)[real].all():
            raise ValueError(
                "position_ids: give each text a row of its own, padded; texts in one row are not told apart"
            )
        behind = positions[:, :, None] - positions[:, None, :]
        window = self.settings["block"]["window"]
        seen = (behind >= 0) & (real[:, :, None] == real[:, None, :])
        seen = seen if window is None else seen & (behind < window)

        x = self.embedding.tokens[input_ids]
        if self.settings["positions"] == "learned":
            x = x + self.embedding.positions[positions]
        ends, last = self._own("ends"), self._own("entry")
        depth, indices = self.settings["depth"], [*self.config.nagjax["indices"], 0]
        stream = self.scheme.open(x, self._own("blocks.attention.entry", 0), ends, indices[0])
        for place, index in enumerate(indices[:-1]):
            block, kind = place // 2, ("attention", "mlp")[place % 2]
            branch, gate = self._own(f"blocks.{kind}.branch", block), self._own(f"blocks.{kind}.gate", block)
            read = self.scheme.read(stream)
            update = self._mlp(read, branch) if place % 2 else self._attention(read, branch, positions, seen[:, None])
            if place % 2 == 0:
                entry = self._own("blocks.mlp.entry", block)
            else:
                entry = self._own("blocks.attention.entry", block + 1) if block + 1 < depth else last
            stream = self.scheme.advance(stream, update, gate, entry, index, indices[place + 1])

        hidden, log_scale = self.scheme.close(stream, ends)
        table = self.embedding.tokens if self.settings["tied"] else self.head.tokens
        scale = log_scale.exp().to(hidden.device)
        logits = (hidden @ self.scheme.head_rows(table).to(hidden).T).float()
        logits = logits * (scale[..., None] if scale.ndim else scale)
        loss = None
        if labels is not None:
            targets, count = labels[:, 1:].flatten().to(logits.device), num_items_in_batch
            reduction = "mean" if count is None else "sum"
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction=reduction)
            loss = loss if count is None else loss / torch.as_tensor(count, device=loss.device)
        output = CausalLMOutput(loss=loss, logits=logits)
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def get_input_embeddings(self):
        return None

    def resize_token_embeddings(self, *_, **__):
        raise ValueError("the adapter's vocabulary is that of the bundle: export a tokenizer with the tokens you need")

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        asked = {name: others[name] for name in NOT_RETURNED if name in others}
        return {"input_ids": input_ids, "attention_mask": attention_mask} | asked
