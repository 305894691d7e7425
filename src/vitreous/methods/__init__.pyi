"""Every method with its options, for editors and type checkers. Written by `make stub`: do not edit."""

from typing import Literal

from vitreous.declaration import ConfiguredMethod

def ensemble(
    *,
    members: str = "centred_lrp:4,token_ablation:1",
) -> ConfiguredMethod:
    """The weighted mean of the maps of several methods; by default of relevance and of what happens without each patch,
    which together are more faithful than either.

    members: methods with their weights; each map is divided by the sum of its absolute values
    """

def optimus(
    *,
    metric: str = "token_deletion",
    single_heads: bool = True,
    methods: bool = True,
    controls: int = 16,
    seed: int = 0,
) -> ConfiguredMethod:
    """The most faithful of many maps, chosen for each image by a metric: those of its attention and of quick methods;
    at a high cost.

    metric: the faithfulness metric that decides, see: vitreous metrics
    single_heads: try each head alone as well
    methods: try the maps of all methods that cost a few forward passes as well
    controls: random maps that are scored beside
    seed: of the random maps
    """

def attention(
    *,
    layer: int = -1,
    heads: Literal["mean", "max", "min"] | int = "mean",
    across: Literal["none", "mean", "min", "max"] = "none",
    query: Literal["read-out"] | tuple[int, int] | tuple[int, int, int] = "read-out",
) -> ConfiguredMethod:
    """How much the tokens that the classifier reads attend to each patch, in one layer or over all; a first look, the
    same for every class.

    layer: layer from 0, or from the end by -1, -2, …
    heads: how the attention heads become one, or one head's number
    across: over all layers, in place of one layer
    query: whose attention: the tokens that the classifier reads, or the patch (row, column); of a video, the tubelet
    (time, row, column)
    """

def attention_flow(
    *,
    heads: Literal["mean", "min", "max"] = "mean",
    discard: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> ConfiguredMethod:
    """The maximum flow from each patch to the tokens that the classifier reads, with attention as capacities; a slow
    alternative to rollout.

    heads: how the heads of a layer become one
    discard: share of each layer's smallest attentions that is set to zero
    residual: weight of the skip connection
    start_layer: first layer of the network of flows
    """

def cass_attention(
    *,
    space: Literal["patch", "pixel"] = "patch",
    samples: int = 16,
    sigma: float = 0.15,
    seed: int = 0,
) -> ConfiguredMethod:
    """The attention of all heads, each weighted by its similarity to a saliency map of the class; shows what the heads
    that follow the class look at.

    space: where attention and saliency are compared
    samples: noisy copies of each image for the saliency
    sigma: noise, as a share of the image's range of values
    seed: another seed gives other noise
    """

def norm_attention(
    *,
    residual: bool = False,
    layer: int | None = None,
) -> ConfiguredMethod:
    """Attention weighted by the norms of the value vectors that it moves; use it where large attention may carry
    little, as on sink tokens.

    residual: with each token itself in what it takes from itself (2021)
    layer: one layer's own row, from 0, or from the end by -1, -2, …; none: all layers
    """

def rollout(
    *,
    heads: Literal["mean", "min", "max"] = "mean",
    discard: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> ConfiguredMethod:
    """How much of each patch reaches, through all layers, the tokens that the classifier reads; the usual attention
    map, the same for every class.

    heads: how the heads of a layer become one
    discard: share of each layer's smallest attentions that is set to zero
    residual: weight of the skip connection
    start_layer: first layer of the product
    """

def value_zeroing(
    *,
    layer: int | None = None,
) -> ConfiguredMethod:
    """How much the tokens that the classifier reads change when a patch's value vector is set to zero; use it to test
    what attention only suggests.

    layer: one layer's own row, from 0, or from the end by -1, -2, …; none: all layers
    """

def attcat(
    *,
    rules: Literal["plain", "libra"] = "plain",
    tokens: Literal["entering", "leaving"] = "entering",
    baseline: Literal["zero", "mean"] = "zero",
) -> ConfiguredMethod:
    """Tokens × gradient at every block, weighted by the attention that each token receives; use it for evidence for and
    against a class.

    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    tokens: the tokens of a layer: those that enter its block (AttCAT) or leave it (LibraGrad)
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    """

def beyond_intuition(
    *,
    variant: Literal["token", "head"] = "token",
    start_layer: int = 6,
    steps: int = 20,
    path: Literal["input", "tokens"] = "input",
) -> ConfiguredMethod:
    """Attention of the upper layers, weighted by how much it changes the tokens, times the mean gradient of the last
    attention; a sharp map for a class.

    variant: what weights the attention: the lengths of the values, or the gradient of each head
    start_layer: first layer of the product, counted from 1 as its authors do (other methods count from 0); 6 is the
    last layer of models with fewer; the authors start the head variant at 4
    steps: points of the path from zero to the image, both included
    path: what follows the path: the image (as published), or only the tokens of the last block
    """

def cdam(
    *,
    variant: Literal["vanilla", "smooth", "integrated"] = "vanilla",
    baseline: Literal["zero", "mean"] = "zero",
    split: Literal["total", "value", "key"] = "total",
    samples: int = 16,
    sigma: float = 0.1,
    steps: int = 20,
    seed: int = 0,
) -> ConfiguredMethod:
    """Gradient × input at the last attention layer's tokens (class-discriminative attention map); a quick, signed map
    for a class, concept or text.

    variant: the gradient at T, its mean over noise on T, or over the way from the baseline to T
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    split: only what passes through the values (proportional to attention) or through the keys
    samples: smooth: noisy copies
    sigma: smooth: noise, in standard deviations of T − T̄
    steps: integrated: points of the way
    seed: smooth: another seed gives other noise
    """

def gae(
    *,
    start_layer: int = 0,
    rules: Literal["plain", "libra"] = "plain",
) -> ConfiguredMethod:
    """Attention that raises the score, followed through all layers (generic attention explainability); a good first map
    for a class.

    start_layer: first layer of the product
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    """

def grad_rollout(
    *,
    discard: float = 0.0,
    start_layer: int = 0,
    rules: Literal["plain", "libra"] = "plain",
) -> ConfiguredMethod:
    """Rollout over attention weighted by its gradient; use it for a rollout that depends on the class.

    discard: share of each layer's smallest entries that is set to zero
    start_layer: first layer of the product
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    """

def legrad(
    *,
    pool: Literal["mean", "readout"] = "mean",
    rules: Literal["plain", "libra"] = "plain",
) -> ConfiguredMethod:
    """The patches to which more attention would raise the score, averaged over all layers; use it to outline the object
    of a class or a text.

    pool: the tokens of a layer that its score reads: all, or the read-out
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    """

def transformer_attribution(
    *,
    start_layer: int = 0,
    precision: Literal["double", "split", "single"] = "double",
) -> ConfiguredMethod:
    """Rollout over the relevance of attention (layer-wise relevance propagation), weighted by its gradient; the
    costlier predecessor of gae.

    start_layer: first layer of the product
    precision: double: exact; split: to 1e-5, faster; single: the model's own, fastest, rough
    """

def gradcam(
    *,
    layer: int = -1,
    at: Literal["block", "norm"] = "norm",
    layers: Literal["one", "all"] = "one",
    rules: Literal["plain", "libra"] = "plain",
    baseline: Literal["zero", "mean"] = "zero",
) -> ConfiguredMethod:
    """The tokens that enter an attention layer, each channel weighted by its mean gradient; a quick, signed map for a
    class, also on Swin and its kind.

    layer: layer from 0, or from the end by -1, -2, …
    at: the tokens that enter the block (weights over all of them), or its attention (over patches)
    layers: this layer, or the sum over all (at=block only)
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    """

def hirescam(
    *,
    layer: int = -1,
    at: Literal["block", "norm"] = "block",
    layers: Literal["one", "all"] = "one",
    rules: Literal["plain", "libra"] = "libra",
    baseline: Literal["zero", "mean"] = "zero",
) -> ConfiguredMethod:
    """Tokens × gradient of one layer, without averaging the gradient; a signed map for a class in which every patch has
    its own weights.

    layer: layer from 0, or from the end by -1, -2, …
    at: the tokens that enter the block (weights over all of them), or its attention (over patches)
    layers: this layer, or the sum over all (at=block only)
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    """

def xgradcam(
    *,
    layer: int = -1,
    at: Literal["block", "norm"] = "block",
    layers: Literal["one", "all"] = "one",
    rules: Literal["plain", "libra"] = "plain",
    baseline: Literal["zero", "mean"] = "zero",
) -> ConfiguredMethod:
    """The tokens of a layer, each channel weighted by its gradient where it is active; a signed map for a class, to be
    used with rules=libra and layers=all.

    layer: layer from 0, or from the end by -1, -2, …
    at: the tokens that enter the block (weights over all of them), or its attention (over patches)
    layers: this layer, or the sum over all (at=block only)
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    """

def centre(
    *,
    width: float = 0.5,
) -> ConfiguredMethod:
    """A blob in the middle of every image; a control to compare with, because objects are often photographed there.

    width: standard deviation, in half sides of the image
    """

def random(
    *,
    seed: int = 0,
) -> ConfiguredMethod:
    """Uniform noise; the control that a map must beat to say anything about the model.

    seed: another seed gives another map
    """

def gradient(
    *,
    reduce: Literal["abs-mean", "sum", "max-abs"] = "abs-mean",
) -> ConfiguredMethod:
    """How much the score changes when a pixel changes a little; a quick map of single pixels for any network, but a
    noisy one.

    reduce: how the colour channels become one: only sum keeps the sign
    """

def input_x_gradient(
    *,
    wrt: Literal["image", "tokens"] = "image",
    rules: Literal["plain", "libra"] = "plain",
    shifts: int = 1,
) -> ConfiguredMethod:
    """Each (normalised) pixel times its gradient, a first estimate of what it adds to the score; quick and signed, for
    any network.

    wrt: the pixels, or the patches at the first block
    rules: the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant
    shifts: with wrt=image: average over so many shifts of the image within one patch
    """

def integrated_gradients(
    *,
    steps: int = 50,
    baseline: Literal["zero", "blur", "noise"] = "zero",
    seed: int = 0,
) -> ConfiguredMethod:
    """What each pixel adds to the score along the path from a baseline to the image; use it when the parts must add up
    to the score.

    steps: points of the path (Gauss–Legendre)
    baseline: where the path begins; zero: the mean colour
    seed: of the noise baseline
    """

def smoothgrad(
    *,
    samples: int = 16,
    sigma: float = 0.15,
    power: Literal[1, 2] = 1,
    reduce: Literal["abs-mean", "sum", "max-abs"] = "abs-mean",
    seed: int = 0,
) -> ConfiguredMethod:
    """The gradient averaged over noisy copies of the image; use it where the plain gradient is too noisy to read.

    samples: noisy copies of each image
    sigma: noise, as a share of the image's range of values
    power: 2: the mean of the squared gradients
    reduce: how the colour channels become one: only sum keeps the sign
    seed: another seed gives other noise
    """

def attn_lrp(
    *,
    wrt: Literal["tokens", "image"] = "tokens",
    gamma_linear: float = 0.0,
    gamma_patch: float = 0.0,
    shifts: int = 1,
) -> ConfiguredMethod:
    """Relevance propagated through all layers, attention included, back to the patches or pixels; use it to see
    evidence for and against a class.

    wrt: relevance of the patches at the first block, or of the pixels
    gamma_linear: γ of linear layers: how much more what raises the size of an output counts; 0: not
    gamma_patch: the same for the patch embedding and other convolutions
    shifts: with wrt=image: average over so many shifts of the image within one patch
    """

def centred_lrp(
    *,
    table: Literal["attn", "cp"] = "attn",
) -> ConfiguredMethod:
    """Relevance of each patch beside the image's mean patch, summed over the blocks; the default map for a class:
    quick, faithful and signed.

    table: the rules: those of attn_lrp or of cp_lrp
    """

def cp_lrp(
    *,
    wrt: Literal["tokens", "image"] = "tokens",
    gamma_linear: float = 0.0,
    gamma_patch: float = 0.0,
    shifts: int = 1,
) -> ConfiguredMethod:
    """Relevance propagated through the values only, with attention held constant; use it beside attn_lrp, for evidence
    for and against a class.

    wrt: relevance of the patches at the first block, or of the pixels
    gamma_linear: γ of linear layers: how much more what raises the size of an output counts; 0: not
    gamma_patch: the same for the patch embedding and other convolutions
    shifts: with wrt=image: average over so many shifts of the image within one patch
    """

def libra_fullgrad(
    *,
    bias: bool = False,
    baseline: Literal["zero", "mean"] = "zero",
) -> ConfiguredMethod:
    """Tokens × gradient at every block, with the Libra gradient, summed over the blocks (FullGrad+); use it for
    faithful evidence for and against a class.

    bias: also what the biases of each token contribute, image by image
    baseline: subtracted from each token: nothing, or the mean token of the image's patches
    """

def res_lrp(
    *,
    gamma: float = 1.0,
    table: Literal["attn", "cp"] = "attn",
    wrt: Literal["tokens", "image"] = "tokens",
    shifts: int = 1,
) -> ConfiguredMethod:
    """Relevance propagated through all layers, kept from growing at every residual addition; use it for evidence for
    and against a class in deep or windowed models.

    gamma: how much more the operand with the sign of the sum counts; 0: no difference
    table: the rules of all other layers: those of attn_lrp or of cp_lrp
    wrt: relevance of the patches at the first block, or of the pixels
    shifts: with wrt=image: average over so many shifts of the image within one patch
    """

def occlusion(
    *,
    fill: Literal["mean", "blur", "zero"] = "mean",
    window: int = 1,
    stride: int = 1,
    of: Literal["logit", "probability"] = "logit",
) -> ConfiguredMethod:
    """How much the score falls when a window of the image is hidden; a direct test for any network, at one forward pass
    for each window.

    fill: what hides: the image's mean colour, its blurred self, or zeros
    window: side of what is hidden at a time, in patches
    stride: from one window to the next, in patches
    of: of what the drop is measured
    """

def rise(
    *,
    masks: int = 500,
    cells: int = 7,
    keep: float = 0.5,
    fill: Literal["mean", "blur", "zero"] = "zero",
    of: Literal["logit", "probability"] = "logit",
    seed: int = 0,
) -> ConfiguredMethod:
    """The mean score over the random masks that show a pixel; for networks of which only the output is known, at
    hundreds of forward passes.

    masks: runs of each image; the published 4000 to 8000 are smoother
    cells: cells of a mask, down and across
    keep: share of the cells that stay visible
    fill: what hides: the image's mean colour, its blurred self, or zeros
    of: what is averaged
    seed: another seed gives other masks
    """

def tis(
    *,
    masks: int = 1024,
    keep: float = 0.5,
    seed: int = 0,
) -> ConfiguredMethod:
    """The mean probability over subsets of tokens that contain a patch; like rise, without images that the model has
    never seen, at half a forward pass for each.

    masks: clusters of channels, one mask each; at most as many as there are channels
    keep: share of the patches that a mask keeps, at least one
    seed: another seed gives other clusters
    """

def token_ablation(
    *,
    of: Literal["logit", "probability"] = "logit",
) -> ConfiguredMethod:
    """How much the score falls when a patch's token is removed from the sequence; the effect of each patch itself, at
    one forward pass for each.

    of: of what the drop is measured
    """

def vit_cx(
    *,
    threshold: float = 0.1,
    noise: float = 0.1,
    seed: int = 0,
) -> ConfiguredMethod:
    """The mean score over masks made of the model's own feature maps, less the harm of what hides the rest; like rise,
    with fewer forward passes.

    threshold: masks nearer than this cosine distance are merged
    noise: standard deviation of what hides; 0: zeros
    seed: another seed gives other noise
    """

def clip_surgery(
    *,
    prompts: str = "",
    empty: bool = True,
    start_layer: int | None = None,
) -> ConfiguredMethod:
    """How much each patch alone resembles a text, values attending to values; use it to find what a text names.

    prompts: texts, separated by |: what they and the target have in common is subtracted
    empty: without prompts: subtract the similarity to the empty text, if the target is a text
    start_layer: the first layer with value–value attention; none: the middle one
    """

def grad_eclip(
    *,
    heads: Literal["true", "one"] = "true",
    ksim: Literal["proj", "qk", "none"] = "proj",
) -> ConfiguredMethod:
    """The values of the last attention that raise the score, loosely weighted by attention; for texts, classes and
    concepts.

    heads: the model's own heads in the last attention, or, as its authors ran it, a single one
    ksim: similarity of query and key that takes the place of attention, W_O applied or not; none: 1
    """

def maskclip(
    *,
    ksim: bool = False,
) -> ConfiguredMethod:
    """The score of each patch alone, its value in place of attention in the last block; use it to find a text's region.

    ksim: times the similarity of a patch's key to that of the token that is read
    """
