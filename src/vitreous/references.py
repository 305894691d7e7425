"""Where methods and metrics come from: every key that a declaration cites, with the work it stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A published work."""

    authors: str
    year: int
    title: str
    place: str
    url: str

    def __str__(self) -> str:
        return f"{self.authors} ({self.year}). {self.title}. {self.place}. {self.url}"


def cited(key: str) -> str:
    """The work behind a key, or the key itself where another package brought it."""
    return str(REFERENCES[key]) if key in REFERENCES else key


def arxiv(number: str) -> str:
    return f"https://arxiv.org/abs/{number}"


REFERENCES: dict[str, Reference] = {
    "abnar2020quantifying": Reference(
        "Abnar, Zuidema", 2020, "Quantifying attention flow in transformers", "ACL", arxiv("2005.00928")
    ),
    "achtibat2024attnlrp": Reference(
        "Achtibat, Hatefi, Dreyer, Jain, Wiegand, Lapuschkin, Samek",
        2024,
        "AttnLRP: attention-aware layer-wise relevance propagation for transformers",
        "ICML",
        arxiv("2402.05602"),
    ),
    "adebayo2018sanity": Reference(
        "Adebayo, Gilmer, Muelly, Goodfellow, Hardt, Kim",
        2018,
        "Sanity checks for saliency maps",
        "NeurIPS",
        arxiv("1810.03292"),
    ),
    "ali2022xai": Reference(
        "Ali, Schnake, Eberle, Montavon, Müller, Wolf",
        2022,
        "XAI for transformers: better explanations through conservative propagation",
        "ICML",
        arxiv("2202.07304"),
    ),
    "ancona2018towards": Reference(
        "Ancona, Ceolini, Öztireli, Gross",
        2018,
        "Towards better understanding of gradient-based attribution methods for deep neural networks",
        "ICLR",
        arxiv("1711.06104"),
    ),
    "berend2026reslrp": Reference(
        "Berend et al.", 2026, "ResLRP", "preprint", "https://arxiv.org/search/?query=ResLRP&searchtype=all"
    ),
    "bhatt2020evaluating": Reference(
        "Bhatt, Weller, Moura",
        2020,
        "Evaluating and aggregating feature-based model explanations",
        "IJCAI",
        arxiv("2005.00631"),
    ),
    "blucher2024decoupling": Reference(
        "Blücher, Vielhaben, Strodthoff",
        2024,
        "Decoupling pixel flipping and occlusion strategy for consistent XAI benchmarks",
        "TMLR",
        arxiv("2401.06654"),
    ),
    "bohle2021convolutional": Reference(
        "Böhle, Fritz, Schiele",
        2021,
        "Convolutional dynamic alignment networks for interpretable classifications",
        "CVPR",
        arxiv("2104.00032"),
    ),
    "bousselham2025legrad": Reference(
        "Bousselham, Boggust, Chaybouti, Strobelt, Kuehne",
        2025,
        "LeGrad: an explainability method for vision transformers via feature formation sensitivity",
        "ICCV",
        arxiv("2404.03214"),
    ),
    "brocki2023class": Reference(
        "Brocki, Binda, Chung",
        2023,
        "Class-discriminative attention maps for vision transformers",
        "arXiv",
        arxiv("2312.02364"),
    ),
    "chalasani2020concise": Reference(
        "Chalasani, Chen, Roy Chowdhury, Wu, Jha",
        2020,
        "Concise explanations of neural networks using adversarial training",
        "ICML",
        arxiv("1810.06583"),
    ),
    "chefer2021generic": Reference(
        "Chefer, Gur, Wolf",
        2021,
        "Generic attention-model explainability for interpreting bi-modal and encoder-decoder transformers",
        "ICCV",
        arxiv("2103.15679"),
    ),
    "chefer2021transformer": Reference(
        "Chefer, Gur, Wolf",
        2021,
        "Transformer interpretability beyond attention visualization",
        "CVPR",
        arxiv("2012.09838"),
    ),
    "chen2023beyond": Reference(
        "Chen, Li, Yu, Dou, Xiong",
        2023,
        "Beyond intuition: rethinking token attributions inside transformers",
        "TMLR",
        "https://openreview.net/forum?id=rm0zIzlhcX",
    ),
    "dosovitskiy2021image": Reference(
        "Dosovitskiy et al.",
        2021,
        "An image is worth 16x16 words: transformers for image recognition at scale",
        "ICLR",
        arxiv("2010.11929"),
    ),
    "draelos2020hirescam": Reference(
        "Draelos, Carin",
        2020,
        "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks",
        "arXiv",
        arxiv("2011.08891"),
    ),
    "fu2020axiom": Reference(
        "Fu, Hu, Dong, Guo, Gao, Li",
        2020,
        "Axiom-based Grad-CAM: towards accurate visualization and explanation of CNNs",
        "BMVC",
        arxiv("2008.02312"),
    ),
    "englebert2023explaining": Reference(
        "Englebert, Stassin, Nanfack, Mahmoudi, Siebert, Cornu, De Vleeschouwer",
        2023,
        "Explaining through transformer input sampling",
        "ICCV Workshops",
        "https://doi.org/10.1109/ICCVW60793.2023.00088",
    ),
    "gildenblat2020exploring": Reference(
        "Gildenblat",
        2020,
        "Exploring explainability for vision transformers",
        "blog post",
        "https://jacobgil.github.io/deeplearning/vision-transformer-explainability",
    ),
    "kindermans2019unreliability": Reference(
        "Kindermans, Hooker, Adebayo, Alber, Schütt, Dähne, Erhan, Kim",
        2019,
        "The (un)reliability of saliency methods",
        "Explainable AI, LNCS 11700",
        arxiv("1711.00867"),
    ),
    "kang2025detecting": Reference(
        "Kang, Anzaku, De Neve, Van Messem, Vankerschaver, Rameau, Ozbulak",
        2025,
        "Detecting regional spurious correlations in vision transformers via token discarding",
        "arXiv",
        arxiv("2509.04009"),
    ),
    "kobayashi2020attention": Reference(
        "Kobayashi, Kuribayashi, Yokoi, Inui",
        2020,
        "Attention is not only a weight: analyzing transformers with vector norms",
        "EMNLP",
        arxiv("2004.10102"),
    ),
    "lee2022cass": Reference(
        "fxnnxc",
        2022,
        "ViT class-wise attention similarity score (CASS)",
        "blog post",
        "https://fxnnxc.github.io",
    ),
    "mehri2025libragrad": Reference(
        "Mehri, Baghshah, Pilehvar",
        2025,
        "LibraGrad: balancing gradient flow for universally better vision transformer attributions",
        "CVPR",
        arxiv("2411.16760"),
    ),
    "li2023closer": Reference(
        "Li, Wang, Duan, Zhang, Li",
        2023,
        "A closer look at the explainability of contrastive language-image pre-training",
        "arXiv",
        arxiv("2304.05653"),
    ),
    "mohebbi2023quantifying": Reference(
        "Mohebbi, Zuidema, Chrupała, Alishahi",
        2023,
        "Quantifying context mixing in transformers",
        "EACL",
        arxiv("2301.12971"),
    ),
    "mylonas2022attention": Reference(
        "Mylonas, Mollas, Tsoumakas",
        2022,
        "An attention matrix for every decision: faithfulness-based arbitration among multiple attention-based "
        "interpretations of transformers in text classification",
        "arXiv",
        arxiv("2209.10876"),
    ),
    "petsiuk2018rise": Reference(
        "Petsiuk, Das, Saenko",
        2018,
        "RISE: randomized input sampling for explanation of black-box models",
        "BMVC",
        arxiv("1806.07421"),
    ),
    "qiang2022attcat": Reference(
        "Qiang, Pan, Li, Li, Jang, Zhu",
        2022,
        "AttCAT: explaining transformers via attentive class activation tokens",
        "NeurIPS",
        "https://papers.nips.cc/paper_files/paper/2022/hash/20e45668fefa793bd9f2edf19be12c4b-Abstract-Conference.html",
    ),
    "rebuffi2020there": Reference(
        "Rebuffi, Fong, Ji, Vedaldi",
        2020,
        "There and back again: revisiting backpropagation saliency methods",
        "CVPR",
        arxiv("2004.02866"),
    ),
    "rong2022consistent": Reference(
        "Rong, Leemann, Borisov, Kasneci, Kasneci",
        2022,
        "A consistent and efficient evaluation strategy for attribution methods",
        "ICML",
        arxiv("2202.00449"),
    ),
    "selvaraju2017grad": Reference(
        "Selvaraju, Cogswell, Das, Vedantam, Parikh, Batra",
        2017,
        "Grad-CAM: visual explanations from deep networks via gradient-based localization",
        "ICCV",
        arxiv("1610.02391"),
    ),
    "shrikumar2017learning": Reference(
        "Shrikumar, Greenside, Kundaje",
        2017,
        "Learning important features through propagating activation differences",
        "ICML",
        arxiv("1704.02685"),
    ),
    "simonyan2014deep": Reference(
        "Simonyan, Vedaldi, Zisserman",
        2014,
        "Deep inside convolutional networks: visualising image classification models and saliency maps",
        "ICLR workshop",
        arxiv("1312.6034"),
    ),
    "smilkov2017smoothgrad": Reference(
        "Smilkov, Thorat, Kim, Viégas, Wattenberg",
        2017,
        "SmoothGrad: removing noise by adding noise",
        "arXiv",
        arxiv("1706.03825"),
    ),
    "sundararajan2017axiomatic": Reference(
        "Sundararajan, Taly, Yan", 2017, "Axiomatic attribution for deep networks", "ICML", arxiv("1703.01365")
    ),
    "wang2020score": Reference(
        "Wang, Wang, Du, Yang, Zhang, Ding, Mardziel, Hu",
        2020,
        "Score-CAM: score-weighted visual explanations for convolutional neural networks",
        "CVPR workshops",
        arxiv("1910.01279"),
    ),
    "wu2024faithfulness": Reference(
        "Wu, Kang, Tang, Hong, Yan",
        2024,
        "On the faithfulness of vision transformer explanations",
        "CVPR",
        arxiv("2404.01415"),
    ),
    "xie2022vit": Reference(
        "Xie, Li, Cao, Zhang", 2022, "ViT-CX: causal explanation of vision transformers", "arXiv", arxiv("2211.03064")
    ),
    "yeh2019fidelity": Reference(
        "Yeh, Hsieh, Suggala, Inouye, Ravikumar",
        2019,
        "On the (in)fidelity and sensitivity of explanations",
        "NeurIPS",
        arxiv("1901.09392"),
    ),
    "zeiler2014visualizing": Reference(
        "Zeiler, Fergus", 2014, "Visualizing and understanding convolutional networks", "ECCV", arxiv("1311.2901")
    ),
    "zhang2018top": Reference(
        "Zhang, Bargal, Lin, Brandt, Shen, Sclaroff",
        2018,
        "Top-down neural attention by excitation backprop",
        "IJCV",
        arxiv("1608.00507"),
    ),
    "zhao2024gradient": Reference(
        "Zhao, Wang, Zeng, Zhao, Chan",
        2024,
        "Gradient-based visual explanation for transformer-based CLIP",
        "ICML",
        "https://proceedings.mlr.press/v235/zhao24p.html",
    ),
    "zhou2022extract": Reference(
        "Zhou, Loy, Dai", 2022, "Extract free dense labels from CLIP", "ECCV", arxiv("2112.01071")
    ),
}
