"""Whether less or more of a metric is better: the one table of names whose direction is a fact of the field.

What a user or a library says counts before the table. A name that the table does not settle has no direction: a call
that needs one raises an error that asks for a mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fluid.errors import InvalidFieldError, require_text


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What less is better of. Names are in lower case, without separators; ``@`` stands for ``@k``.
_LESS = _names(
    # Regression
    "mse rmse mae mape smape wmape wape mase msle rmsle rmsse nmse nrmse mdae medae mspe rmspe rse rae sse l1 l2 mphe"
    " huber pseudohuber logcosh pinball crps"
    # Classification and likelihood
    " ce bce cce xent crossentropy binarycrossentropy categoricalcrossentropy sparsecategoricalcrossentropy nll"
    " nloglik poissonnloglik gammanloglik coxnloglik aftnloglik tweedienloglik negativeloglikelihood"
    " negativeloglik nelbo kl kld kldiv kldivergence kullbackleibler jsd jsdivergence jensenshannon"
    " jensenshannondivergence hinge squaredhinge categoricalhinge zerooneloss poisson brier ece merror"
    " misclassification misclassificationrate hamming hammingdistance fpr fnr falsepositiverate falsenegativerate"
    " falsepositives falsenegatives falsealarmrate missrate fallout eer mindcf fpr95 negativelikelihoodratio"
    " deviance poissondeviance gammadeviance tweediedeviance binomialdeviance aic aicc bic"
    # Text and compression
    " perplexity ppl wer cer mer ter der bpb bpc bpd bitsperbyte bitsperchar bitspercharacter bitsperdim editdistance"
    " translationeditrate levenshtein levenshteindistance"
    # Images, audio and distributions
    " fid kid fvd fad lpips niqe brisque frechetinceptiondistance kernelinceptiondistance hausdorff hausdorffdistance"
    " hd95 chamfer chamferdistance wasserstein wassersteindistance mmd daviesbouldin"
    # Losses that are named after what they raise
    " diceloss diceceloss iouloss giouloss diouloss ciouloss jaccardloss ssimloss elboloss contrastiveloss"
    # Optimization and systems
    " cost regret simpleregret cumulativeregret latency inferencelatency latencyms latencys latencyus"
)
#: What more is better of.
_MORE = _names(
    # Classification
    "accuracy acc balancedaccuracy accnorm precision recall sensitivity specificity f1 f2 fbeta fscore fmeasure auc"
    " auroc rocauc aucroc rocaucovr rocaucovo auprc aucpr prauc aucprc aucmu logauc ap averageprecision jaccard"
    " jaccardindex cohenkappa cohenskappa kappa qwk quadraticweightedkappa fleisskappa mcc matthews matthewscorrcoef"
    " matthewscorrelation matthewscorrelationcoefficient exactmatch em tpr tnr ppv npv truepositiverate"
    " truenegativerate positivepredictivevalue negativepredictivevalue truepositives truenegatives precisionatrecall"
    " recallatprecision sensitivityatspecificity specificityatsensitivity positivelikelihoodratio hit hits hitrate"
    " passrate pass@ p@ r@"
    # Ranking and detection
    " map map50 map75 map5095 mar ndcg dcg mrr meanreciprocalrank reciprocalrank pre ams iou onehotiou onehotmeaniou"
    " miou dice dicecoefficient dicecoef dsc panopticquality pck"
    # Regression
    " r2 rsquared adjustedr2 d2absoluteerror d2pinball d2tweedie d2logloss d2brier explainedvariance pearson pearsonr"
    " pearsoncorrelation pearsoncorrcoef spearman spearmanr spearmancorrelation spearmancorrcoef kendalltau"
    " kendallrankcorrcoef concordance concordanceindex concordancecorrelation concordancecorrcoef cindex plcc srcc krcc"
    " cosinesimilarity nse intervalregressionaccuracy"
    # Likelihood
    " likelihood loglikelihood loglik logprob elbo logevidence marginalloglikelihood logmarginallikelihood"
    # Text, images and audio
    " bleu bleu1 bleu2 bleu3 bleu4 sacrebleu rouge rouge1 rouge2 rougel rougelsum meteor chrf cider bertscore bleurt"
    " comet psnr ssim msssim inceptionscore clipscore sdr sisdr sisnr snr pesq stoi estoi"
    # Clustering
    " silhouette calinskiharabasz ari nmi ami adjustedrand adjustedrandindex rand randindex mutualinfo"
    " normalizedmutualinfo adjustedmutualinfo homogeneity completeness vmeasure fowlkesmallows dunnindex purity"
    # Reinforcement learning and systems
    " reward rewards return returns rew eprew episodereward episodereturn cumulativereward cumulativereturn"
    " discountedreturn winrate successrate sharpe sharperatio profit throughput speedup tokenspersecond"
    " samplespersecond imagespersecond stepspersecond"
)
#: Nouns that say by themselves that less is better, whatever they are of, as in ``policy_loss`` and ``num_errors``.
_BADNESS = _names("loss losses logloss mlogloss error errors err errorrate")
#: Words before such a noun with which it may say something else, as in ``steps_to_error`` and ``gap_loss``.
_TURNS = _names(
    "to no non not without until free less gap difference diff delta ratio reduction improvement drop gain inverse inv"
    " reciprocal minus negative std"
)
#: Words before and behind a name that leave its direction as it is: data, means, kinds, steps.
_AROUND = _names(
    "val valid validation dev test testing train training eval evaluation evaluator holdout cv oof fold split learn"
    " mean avg average median total sum overall global macro micro weighted samples balanced normalized running ema"
    " smoothed final last best current max min binary multi multiclass multilabel sparse categorical class cls label"
    " token word node pixel image bbox segm mask matched mismatched top topk k ovr ovo epoch step iter metric metrics"
    " rollout env runners custom episode percent pct"
)
#: Words that may stand behind a name of the table, too.
_SCORES = _names("score scores")
_NUMBER = re.compile(r"(?:top|fold|split|valid|val|p)?\d+")
_CUTOFF = re.compile(r"@[^/_\s]*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: What users say of a direction: Fluid's words, and those of Optuna, W&B, scikit-learn and Keras Tuner.
_MODE_WORDS = {
    **dict.fromkeys(("min", "minimize", "minimise", "minimum", "lower", "lower_is_better"), "min"),
    **dict.fromkeys(("max", "maximize", "maximise", "maximum", "higher", "greater_is_better"), "max"),
}
#: Turns a direction around. ``negative`` does not: ``negative_recall`` may be the recall of a class.
_NEG = "neg"
_SIGNS = frozenset({_NEG})
#: ``1-accuracy`` is no accuracy.
_COMPLEMENT = re.compile(r"(?:^|[/\s])\d+(?:\.\d+)?\s*-")


def direction_of(metric: str) -> str | None:
    """Returns ``"min"`` if less of a metric is better, ``"max"`` if more is, or ``None`` if its name leaves it open.

    Names are compared whole, without regard to case and separators, after what stands around them is left out: data as
    in ``val_``, ``validation_0-`` and ``test/``, means as in ``macro`` and ``mean``, ``@k``, and a ``-`` at the end.
    ``neg_`` turns the direction around. Any other loss or error is better if there is less of it.

    Example:
        >>> from fluid.directions import direction_of
        >>> [direction_of(name) for name in ("val_loss", "valid-ndcg@5-", "neg_log_loss", "default")]
        ['min', 'max', 'max', None]
    """
    if _COMPLEMENT.search(metric):
        return None
    plain = re.sub(r"\([^)]*\)", " ", metric)
    for name in (plain, _HUMP.sub("_", plain)):
        words = re.findall(r"[a-z0-9]+@?", _CUTOFF.sub("@", name.lower()))
        found = _in_table(words) or _of_badness(words)
        if found is not None:
            return found
    return None


def mode_word(field: str, value: object) -> str:
    """Returns ``"min"`` or ``"max"`` for what a user has said, also in the words of other libraries.

    Example:
        >>> from fluid.directions import mode_word
        >>> [mode_word("mode", said) for said in ("min", "Maximize", "minimise")]
        ['min', 'max', 'min']

    Raises:
        InvalidFieldError: it is none of them.
    """
    text = getattr(value, "name", value)  # Optuna's StudyDirection.MINIMIZE.
    found = _MODE_WORDS.get(text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise InvalidFieldError(field, value, "must be 'min' (less is better), 'max' (more is better), or None")
    return found


def known_mode(metric: str, mode: object = None) -> str | None:
    """Returns the mode that was said, else the direction of the metric; ``None`` if its name leaves it open.

    Raises:
        InvalidFieldError: something else was said.
    """
    return direction_of(metric) if mode is None else mode_word("mode", mode)


def require_mode(metric: str, mode: object = None) -> str:
    """Returns the same of a metric whose direction must be known.

    Raises:
        InvalidFieldError: nothing was said, and the metric's name leaves it open; or something else was said.
    """
    found = known_mode(metric, mode)
    if found is None:
        raise InvalidFieldError("mode", None, open_text(metric))
    return found


def require_goals(name: str, value: object) -> tuple[tuple[str, str], ...]:
    """Returns metrics with their modes.

    Raises:
        InvalidFieldError: it is no list of pairs of these.
    """
    if not isinstance(value, (tuple, list)):
        raise InvalidFieldError(name, value, "must be a list of metrics with their modes, such as [('latency', 'min')]")
    goals = []
    for position, pair in enumerate(value):
        entry = f"{name}[{position}]"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidFieldError(entry, pair, "must be a metric and its mode, such as ('latency', 'min')")
        goals.append((require_text(entry, pair[0]), mode_word(entry, pair[1])))
    return tuple(goals)


def open_text(metric: str, ways: str = "mode='min' or mode='max'") -> str:
    """Says that the name of a metric leaves its direction open, and how to say which it is."""
    return f"{metric!r} may mean either; pass {ways}"


def search_text(metric: str) -> str:
    """The same where the trials of a group are shown."""
    return open_text(metric, f"Search({metric!r}, 'min') or 'max'")


def direction_text(mode: str) -> str:
    """What stands beside a best value: ``"less is better"`` or ``"more is better"``."""
    return "less is better" if mode == "min" else "more is better"


def _in_table(words: Sequence[str]) -> str | None:
    """The direction of the longest name of the table that the words are, apart from what stands around it."""
    for before, core, behind in _parts(words):
        name = core if core in _MORE else core.replace("@", "")
        known = name in _LESS or name in _MORE
        if known and _leave(before, _SIGNS) and _leave(behind, _SCORES):
            return _turned("min" if name in _LESS else "max", before)
    return None


def _of_badness(words: Sequence[str]) -> str | None:
    """The direction of a loss or an error of any kind, unless a word before it contradicts."""
    for before, core, behind in _parts(words):
        if core.replace("@", "") in _BADNESS and _leave(behind):
            return None if any(word in _TURNS or word in _MORE for word in before) else _turned("min", before)
    return None


def _parts(words: Sequence[str]) -> Iterator[tuple[Sequence[str], str, Sequence[str]]]:
    """The words before a name, the name, and the words behind it; the longest names first."""
    for length in range(len(words), 0, -1):
        for start in range(len(words) - length + 1):
            yield words[:start], "".join(words[start : start + length]), words[start + length :]


def _leave(words: Sequence[str], further: frozenset[str] = frozenset()) -> bool:
    """Whether words around a name leave it as it is, or are among some further ones."""
    return all(word in _AROUND or word in further or _NUMBER.fullmatch(word) for word in words)


def _turned(mode: str, before: Sequence[str]) -> str:
    is_turned = before.count(_NEG) % 2 == 1
    return mode if not is_turned else "max" if mode == "min" else "min"
