"""Directions of metrics: those of the table, those that libraries give their own metrics, and names without one."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from fluid.directions import direction_of, known_mode, require_mode
from fluid.errors import InvalidFieldError

LESS = """
loss val_loss train/loss eval/loss test.loss Loss valLoss loss_mean train_loss_epoch policy_loss d_loss loss_cls
losses eval/cross-entropy-loss dice_loss zero_one_loss hinge_loss cosine_similarity_loss weighted_loss
best_val_loss head/loss error val_error error_rate top5_error num_errors max_error reconstruction_error
valid-error validation_0-error@0.5 err val_err calibration_error coverage_error word_error_rate bit_error_rate
mse rmse RMSE mae MAE mape smape msle rmsle val_rmsle mean_squared_error mean_absolute_percentage_error l2
train-l2 root_mean_squared_log_error MeanSquaredError median_absolute_error logcosh huber pinball cross_entropy
val_cross_entropy crossentropy cross-entropy CrossEntropy bce val/ce binary_crossentropy log_loss logloss
valid-logloss mlogloss validation_0-mlogloss merror validation_0-merror valid_0-binary_logloss
valid_0-multi_error nll neg_log_likelihood negative_log_likelihood NegativeLogLikelihood nelbo neg_elbo kl
kl_div kl_divergence brier_score brier_score_loss ece hamming_distance misclassification misclassification_rate
false_positive_rate fpr EER hinge aic bic gamma-deviance valid-gamma-deviance tweedie-nloglik@1.5 cox-nloglik
poisson_deviance mean_tweedie_deviance perplexity ppl wer cer eval_wer bits_per_byte bpb bits_per_dim
edit_distance fid FID kid lpips hausdorff_distance davies_bouldin_score wasserstein_distance cost regret latency
inference_latency p99_latency neg_accuracy neg_reward negative_likelihood_ratio
"""
MORE = """
accuracy acc val_acc val_accuracy valAcc test/acc accuracy_top1 top_5_accuracy top-1-acc MulticlassAccuracy
balanced_accuracy sparse_categorical_accuracy eval_accuracy accuracy@1 mean_test_accuracy split0_test_accuracy
acc_norm precision recall recall@10 recall@10_val precision_macro f1 f1_score macro_f1 f1_weighted F1Score
fbeta_score sensitivity specificity auc AUROC val_auc_1 roc_auc roc_auc_ovr_weighted aucpr pr_auc auc_mu
average_precision kappa mcc cohen_kappa_score matthews_corrcoef eval_matthews_correlation exact_match
negative_predictive_value ndcg ndcg@5- valid-ndcg@5- train-map- map@3 mAP mAP@0.5:0.95 mAP_50
metrics/mAP50-95(B) mrr dcg hit@10 hits@1 pass@1 pre@2 valid-pre@2 ams@0.15 valid-interval-regression-accuracy
iou mIoU mean_iou meanIoU dice dice_score jaccard r2 r2_score R2Score d2_log_loss_score explained_variance
pearson spearmanr c_index cosine_similarity neg_mean_squared_error neg_log_loss neg_loss
neg_root_mean_squared_error mean_test_neg_log_loss neg_brier_score neg_negative_likelihood_ratio log_likelihood
elbo bleu rouge1 rougeL eval_rouge2 meteor bertscore psnr ssim si_sdr pesq inception_score silhouette_score
adjusted_rand_score normalized_mutual_info_score v_measure_score reward episode_reward_mean mean_reward
rollout/ep_rew_mean env_runners/episode_return_mean return win_rate success_rate throughput tokens_per_second
sharpe_ratio
"""
NEITHER = """
default objective y score val_score eval_score mean_test_score value metric foo val_foo margin quality fitness
gain total time seconds runtime runtime_s wall_time eval_runtime time_total_s memory memory_mb size params lr
learning_rate epoch step training_iteration gap accuracy_gap generalization_gap residual risk distance entropy
temperature grad_norm error_free_rate lossless_ratio loss_ratio loss_scale loss_weight loss_std std_loss
accuracy_std gloss floss glossary accuracy_loss recall_loss precision_error time_to_accuracy steps_to_error
epochs_to_loss attack_accuracy 1-accuracy 1-auc val/1-acc one_minus_accuracy inverse_accuracy accuracy_drop
negative_recall minus_loss loss_reduction no_error_share true_loss_free weight_decay val test train mean
"""


@pytest.mark.parametrize(("mode", "names"), [("min", LESS), ("max", MORE), (None, NEITHER)])
def test_names(mode: str | None, names: str) -> None:
    found = {name: direction_of(name) for name in names.split()}
    assert len(found) > 50 and found == dict.fromkeys(found, mode)


def test_what_is_said_counts_before_the_name() -> None:
    assert require_mode("loss", "max") == "max" and require_mode("loss") == "min"
    assert known_mode("margin") is None and known_mode("margin", "min") == "min"
    with pytest.raises(InvalidFieldError) as refused:
        require_mode("val_foo")
    assert str(refused.value) == "mode=None: 'val_foo' may mean either; pass mode='min' or mode='max'"
    with pytest.raises(InvalidFieldError, match="mode='less'"):
        require_mode("loss", "less")


def test_scorers_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    names = metrics.get_scorer_names()
    assert len(names) > 50
    assert {name: direction_of(name) for name in names} == dict.fromkeys(names, "max"), "greater is better of scorers"


def test_metrics_of_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    said: dict[str, str] = {}
    halves = [{name: 0.5} for name in ("recall", "precision", "specificity", "sensitivity")]
    arguments: list[dict[str, Any]] = [{}, *halves, {"num_classes": 2}, {"num_classes": 2, "target_class_ids": [0]}]
    for kind in vars(keras.metrics).values():
        for given in arguments if inspect.isclass(kind) else ():
            try:
                made = kind(**given)
            except TypeError:
                continue
            if getattr(made, "_direction", None) is not None:
                said[f"val_{made.name}"] = {"up": "max", "down": "min"}[made._direction]
            break
    assert len(said) > 25
    assert {name: direction_of(name) for name in said} == said


def test_metrics_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    said = {
        name: "max" if kind.higher_is_better else "min"
        for module in ("classification", "regression", "retrieval", "text")
        for name, kind in vars(getattr(torchmetrics, module)).items()
        if inspect.isclass(kind) and isinstance(getattr(kind, "higher_is_better", None), bool)
    }
    assert len(said) > 50
    known = {name: found for name in said if (found := direction_of(name)) is not None}
    assert known == {name: said[name] for name in known} and len(known) > 45, sorted(set(said) - set(known))
