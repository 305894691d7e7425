// What each view shows, when to believe it and when not. JSON behind the first `=`: the documentation and the tests read it too.

export const TEXTS =
{
  "explain": {
    "title": "Explain",
    "shows": "One map for each method (column) and each target (row), drawn over the image that the model sees. Orange patches are evidence for the target, blue patches are evidence against it. Unsigned maps have one ramp, dark to light, and show no counter-evidence.",
    "believe": "Methods that work differently mark the same patches, the maps of two targets differ, and the Faithfulness tab shows that the model loses the target without these patches.",
    "doubt": "The maps of two classes look alike, a control (random, centre) would do as well, or the target has hardly any probability. Colours are scaled map by map: compare sizes by the numbers below, or with “Same scale”.",
    "methods": "shown"
  },
  "targets": {
    "title": "Targets",
    "shows": "What the maps explain. A class is the usual target. A contrast (dog - cat) asks for one class rather than another. A text, a concept, a neuron, a region drawn on the image, a detection or a word of an answer are targets too, where the loaded model has them.",
    "believe": "The target has a clear score on this image. “Top-1” follows the model's first choice when the image changes; a class that was chosen by name stays.",
    "doubt": "The target has a probability near zero: the map then explains small changes of a small number."
  },
  "regions": {
    "title": "Regions and detections",
    "shows": "A map for one part of the output: the class inside a region that you draw, or one detected box. The score is that of the chosen places only.",
    "believe": "The region holds one thing, and the map changes when you move the region.",
    "doubt": "The region covers several things: their evidence is added up. Evidence outside the region is no error: models use the surroundings."
  },
  "words": {
    "title": "Words of an answer",
    "shows": "The model answers a question about the image, and each word of the answer is a target: the map shows what in the image speaks for this word, after the words before it.",
    "believe": "Words that name a thing have their evidence on it, and the map changes from word to word.",
    "doubt": "Words such as “a” or “is” come from the language, not from the image; their maps say little. Another question may give the same word for other reasons."
  },
  "latents": {
    "title": "Concepts found",
    "shows": "Directions that were found in the features of the model without labels, by a sparse autoencoder or semi-NMF. The map shows how strongly one of them is active in each patch, and each can be a target like a class.",
    "believe": "A direction answers to the same thing in many images. Look at several before you give it a name.",
    "doubt": "Its name was suggested by a single image. A strong direction need not change the decision: test it with the eraser or on the Faithfulness tab."
  },
  "video": {
    "title": "Video",
    "shows": "The maps of a clip, frame by frame. A model of videos reads several frames at once, so one map has a time axis; move the scrubber to see its frames on one colour scale.",
    "believe": "The map follows the thing when it moves.",
    "doubt": "A tubelet (a patch over several frames) is the finest unit of a map: it is never sharper in time than that. An image model that is run frame by frame knows nothing of motion."
  },
  "compare": {
    "title": "Compare",
    "shows": "Images as rows and models as columns, with one method and one target; with a single model, its methods are the columns. All maps of a method share one colour scale. Choose two maps of an image to see their difference. Agreement figures say how alike two maps are: a rank correlation of 1 is the same order of patches, 0 is no relation.",
    "believe": "The difference lies in a few connected patches, and another method shows it too.",
    "doubt": "The models see different parts of the image (other sizes or crops), or give the target very different probabilities: then the values have different units. High agreement does not mean that both maps are right."
  },
  "attention": {
    "title": "Attention",
    "shows": "How much one token attends to every patch, in one layer and one attention head. Without a selected patch this is the read-out: the token that the classifier reads. The table has all attention heads, and a bar for the share that goes to CLS, registers and patches.",
    "believe": "You ask where a layer takes information from. The numbers are exact: they are the model's own attention weights.",
    "doubt": "You look for the reason for a decision. Attention ignores what is moved (the values), all other layers and the MLPs, and it is the same for every class. A few patches with very much attention may be outliers that the model uses as memory.",
    "methods": ["attention"]
  },
  "rollout": {
    "title": "Rollout",
    "shows": "The attention of all layers multiplied, with a share for the residual connection: how much of each patch could reach the read-out. “Discard” drops the weakest attention first.",
    "believe": "You want a rough overview of what the whole network looks at, and read only the highest patches.",
    "doubt": "You read its outline: the product is smooth, and no patch is near zero. It is the same for every class, and it ignores values and MLPs. Other settings give other maps, and none is the true one.",
    "methods": ["rollout", "grad_rollout"]
  },
  "concepts": {
    "title": "Concepts",
    "shows": "Where the image resembles a concept. A concept is the mean embedding of a few example images; the score is the similarity to it. No class and no label is needed.",
    "believe": "The examples differ in everything but the concept, and the map also marks it in an image that was not among them.",
    "doubt": "The examples share a background, a colour or one single photograph: the concept is then that. A concept made of one photograph, as in the packaged examples, is a concept of this photograph.",
    "methods": ["cdam"]
  },
  "curves": {
    "title": "Curves",
    "shows": "The model's score for the target while patches are removed (deletion) or shown (insertion) in the order of each map. The grey band shows random maps. The area under the curve (AUC) is one number for a curve.",
    "believe": "A curve lies clearly outside the grey band: deletion below it, insertion above it.",
    "doubt": "One image decides little: compare methods on many (vitreous evaluate). The model has not seen images with holes, so part of the fall comes from the holes; the random maps show how much. Only the order of the patches counts, not their values.",
    "metrics": ["deletion", "insertion", "token_deletion"]
  },
  "eraser": {
    "title": "Eraser",
    "shows": "The model runs again on the image without the patches that you paint away. The bars are its probabilities now, the marks are those of the whole image.",
    "believe": "You ask about this model and this image: the eraser runs the model itself, so its numbers are exact there.",
    "doubt": "You look for the only cause: two patches may carry the same information, and removing either one then changes nothing. Many removed patches make an image that the model may never have seen.",
    "metrics": ["token_deletion"],
    "methods": ["token_ablation", "occlusion"]
  },
  "counterfactual": {
    "title": "What would change it?",
    "shows": "A small set of patches whose removal turns the decision into another class. The bold curve follows this set, the thin one the order of a contrast map.",
    "believe": "The result says that it was proved: the model was run on exactly this image. “No single one can be put back” means that every patch of the set is needed.",
    "doubt": "You take the set for the only reason: other sets may do the same. A turn to a class that has nothing to do with the image says that the model is unsure, not that the patches show that class."
  },
  "inside": {
    "title": "Head similarity",
    "shows": "How similar the attention of each attention head is to the saliency of the target (CASS): tall bars are attention heads that look where the class is.",
    "believe": "The differences between attention heads are large, and they stay when the image changes.",
    "doubt": "You take it for importance: an attention head that looks at the object need not change the score. Both maps are positive, so all similarities are above zero. Remove an attention head to learn what it does (vitreous ablate).",
    "methods": ["cass_attention"]
  },
  "layers": {
    "title": "Layer by layer",
    "shows": "The attention of the tokens that the classifier reads, averaged over the attention heads, from the first layer to the last.",
    "believe": "You read the trend over the layers: often, early layers look everywhere and late ones at a few patches.",
    "doubt": "Attention heads of a layer look at different things: their mean may then look like none of them. What a late token holds need not come from the patch at its place.",
    "methods": ["attention"]
  },
  "qk": {
    "title": "Queries and keys",
    "shows": "q·k is the attention score before the softmax, for the selected patch or the read-out. The colours are three principal components of the queries and of the keys: similar colours, similar vectors.",
    "believe": "You compare q·k between patches: the differences decide where the softmax puts its weight. The sign alone says nothing, because the softmax ignores a constant that is added to all of them.",
    "doubt": "You compare colours across layers, attention heads or images: each has principal components of its own. Three components may show only a part of the vectors."
  },
  "features": {
    "title": "Features",
    "shows": "The patch tokens after a layer, as colours: their first three principal components are red, green and blue. The other map is the cosine between every patch and the selected one.",
    "believe": "Patches have equal colours in a common basis, and the three components hold much of the variance (the percentages above the maps).",
    "doubt": "You give a colour a meaning: it has none, and in a basis of one image the colours change with the image. Similar features do not say that the classifier uses them."
  },
  "methods": {
    "title": "Methods",
    "shows": "All methods, by family. Each has a page with its formula, its options, its source and its known limits.",
    "believe": "Its curve on the Faithfulness tab is clearly better than the random maps, on images like yours.",
    "doubt": "A map merely looks right. The controls “random” and “centre” know nothing of the model; a method should beat them."
  }
};

/** What every key does, and where. */
export const KEYS =
[
  ["?", "help for the view that has the focus"],
  ["Tab", "to the next control; Shift and Tab to the one before"],
  ["← →", "on the tabs: another view; in the tour: the step before and the next one"],
  ["← → ↑ ↓", "on a map: move the cross-hair on all maps; on a table of attention heads: another one; on curves: along a curve, and to another one"],
  ["↑ ↓", "in the list of methods: the one before and the next one (Home, End: the first and the last)"],
  ["Enter", "on a map: hold the cross-hair"],
  ["Escape", "let go of the cross-hair; close help, the tour, a list or a dialog"],
  ["A B", "on a map of the Compare tab: make it the first or the second of the two that are compared"],
  ["Shift", "held on the Attention tab: the other direction"],
  ["Space", "on the eraser and on the set of patches: remove or restore the patch"],
  ["Ctrl+Z", "on the Faithfulness tab: undo the eraser"]
];
