"""The table of recipes: commands, their served models, and the checks of their outcomes. `quick` rows belong to every
test run; the others only to `make test-recipes`. Rows run in this order: a row may continue an earlier one's log
directory (`after`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipes.checks import (
    Check,
    above,
    always,
    at,
    checkpoint_is_deleted,
    checkpoints,
    falls,
    first,
    learns_from_contrast,
    logs,
    moves,
    on_policy,
    says,
)
from recipes.runner import RUNS

TINY = ("local/tiny",)
SMALL = ("Qwen/Qwen3-8B",)
BASE = ("Qwen/Qwen3-8B-Base",)
GAME = ("Qwen/Qwen3.5-4B",)
GAMES = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B")
LANGUAGES = ("Qwen/Qwen3.6-35B-A3B",)
IMAGES = ("Qwen/Qwen3-VL-30B-A3B-Instruct",)
HYBRID = ("Qwen/Qwen3.5-27B",)

REWARD = "env/all/reward/total"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    """Short and unique: also the log directory, if the recipe takes one."""

    module: str
    """Below `tinker_cookbook`."""

    arguments: str
    models: tuple[str, ...]
    exercises: str
    checks: tuple[Check, ...]
    quick: bool = True
    takes_log_path: bool = True
    after: str = ""
    """The row whose log directory this one continues."""

    standard_input: str = ""

    @property
    def log(self) -> str:
        return self.after or self.name

    @property
    def command(self) -> tuple[str, ...]:
        log_path = (f"log_path={self.log}",) if self.takes_log_path else ()
        return ("-m", f"tinker_cookbook.{self.module}", *self.arguments.split(), *log_path)


M = "model_name=local/tiny renderer_name=role_colon"
CHAT = f"{M} dataset=conv.jsonl batch_size=4"
ARITHMETIC = f"env=arithmetic {M} groups_per_batch=4 group_size=8 max_tokens=5 max_steps=2"
BOXED = "model_name=Qwen/Qwen3-8B-Base renderer_name=role_colon groups_per_batch=4 group_size=8 max_tokens=16"
RL_LOOP = "model_name=Qwen/Qwen3-8B-Base batch_size=2 group_size=16 max_tokens=16 max_steps=2"
SDFT = "model_name=Qwen/Qwen3-8B groups_per_batch=2 max_tokens=8 topk=3 max_steps=2 eval_every=0"
HYBRID_MODEL = "model_name=Qwen/Qwen3.5-27B renderer_name=qwen3_5_disable_thinking"
GAME_SIZES = "model_name=Qwen/Qwen3.5-4B renderer_name=role_colon max_tokens=8 max_steps=1 eval_every=0"

# Groups are so large that by chance some are mixed.
LEARNS_FROM_SUMS = (logs(REWARD, 2), learns_from_contrast, on_policy)
LEARNS_FROM_BOXES = (on_policy, always("env/all/correct", 0.01, 0.99), learns_from_contrast, checkpoints("final"))

SUPERVISED = (
    Row(
        "1",
        "recipes.chat_sl.train",
        f"{CHAT} max_steps=2 save_every=1",
        TINY,
        "cross_entropy, optim_step, saves, telemetry",
        (logs("train_mean_nll", 2), above("grad_norm", 0), checkpoints("000001", "final")),
    ),
    Row(
        "2",
        "recipes.chat_sl.train",
        f"{CHAT} max_steps=4 save_every=1 behavior_if_log_dir_exists=resume",
        TINY,
        "a model made from a checkpoint with its optimizer",
        # The first run is cut after its first checkpoint: two of its steps, then the second to the fourth.
        (logs("train_mean_nll", 5), checkpoints("000001", "000002", "000003", "final")),
        after="1",
    ),
    Row(
        "3",
        "recipes.chat_sl.train",
        f"{CHAT} max_steps=2 save_every=2 rolling_save_every=1 rolling_ttl_seconds=3600",
        TINY,
        "rolling checkpoints: saved to expire, deleted",
        (logs("train_mean_nll", 2), checkpoint_is_deleted("000001")),
    ),
    Row(
        "8",
        "recipes.sl_loop",
        "model_name=Qwen/Qwen3-8B-Base batch_size=4 max_steps=2",
        BASE,
        "the low-level supervised loop",
        (logs("train_mean_nll", 2), above("grad_norm", 0), checkpoints("final")),
    ),
    Row(
        "10",
        "recipes.sl_basic",
        "model_name=Qwen/Qwen3-8B-Base max_steps=1",
        BASE,
        "batches of 128, NLL of a test set",
        (logs("train_mean_nll", 1), logs("test/nll", 1), checkpoints("final")),
    ),
    Row(
        "17",
        "recipes.distillation.off_policy_reasoning",
        f"{M} batch_size=4 buffer_size=16 max_prompts=64 max_steps=2",
        TINY,
        "data that is streamed",
        (logs("train_mean_nll", 2), checkpoints("final")),
        quick=False,
    ),
    Row(
        "30",
        "recipes.vlm_classifier.train",
        "model_name=Qwen/Qwen3-VL-30B-A3B-Instruct renderer_name=qwen3_vl_instruct experiment_dir=vlm batch_size=4 "
        "lora_rank=8 learning_rate=1e-2 lr_schedule=constant max_steps=6 eval_every=3 n_eval=4 max_tokens=4",
        IMAGES,
        "images in training and in prompts",
        (
            at(
                "vlm/*",
                logs("train_mean_nll", 6),
                falls("train_mean_nll"),
                logs("test/nll", 2),
                falls("test/nll"),
                checkpoints("final"),
            ),
        ),
        takes_log_path=False,
    ),
    Row(
        "19",
        "recipes.prompt_distillation.train",
        f"file_path=conv.jsonl {M} batch_size=4 max_steps=2",
        TINY,
        "supervised data from a file",
        (logs("train_mean_nll", 2), checkpoints("final")),
        quick=False,
    ),
    Row(
        "22",
        "recipes.chat_sl.train",
        f"{M} dataset=no_robots batch_size=8 max_steps=4 eval_every=1 learning_rate=1e-3",
        TINY,
        "the NLL evaluator on a test set, step by step",
        (logs("test/nll", 4), falls("test/nll"), falls("test/bpb"), checkpoints("final")),
    ),
    Row(
        "31",
        "recipes.chat_sl.train",
        f"{HYBRID_MODEL} dataset=no_robots batch_size=8 max_steps=4 eval_every=2 learning_rate=3e-3",
        HYBRID,
        "gated delta nets, the renderer of Qwen3.5",
        (logs("train_mean_nll", 4), above("grad_norm", 0), falls("test/nll"), checkpoints("final")),
        quick=False,
    ),
)

REINFORCEMENT = (
    Row(
        "4",
        "recipes.math_rl.train",
        ARITHMETIC,
        TINY,
        "stable_reinforce, provenance spans",
        (*LEARNS_FROM_SUMS, checkpoints("final")),
    ),
    Row(
        "32",
        "recipes.math_rl.train",
        f"env=arithmetic {HYBRID_MODEL} groups_per_batch=2 group_size=4 max_tokens=6 max_steps=2 eval_every=0",
        HYBRID,
        "trainer and sampler agree on gated delta nets",
        # A random model is never right, so nothing is learned; only sampling is checked.
        (logs(REWARD, 2), on_policy, checkpoints("final")),
        quick=False,
    ),
    Row(
        "4a",
        "recipes.math_rl.train",
        f"{ARITHMETIC} loss_fn=importance_sampling compute_post_kl=True",
        TINY,
        "importance_sampling, ephemeral samplers, divergence by logprobs",
        # The step changed the sampler's distribution slightly.
        (*LEARNS_FROM_SUMS, always("kl_pre_post_v2", 1e-12, 1e-2), checkpoints("final")),
    ),
    Row(
        "4b",
        "recipes.math_rl.train",
        f"{ARITHMETIC} max_steps_off_policy=2 loss_fn=ppo",
        TINY,
        "ppo, asynchronous",
        (*LEARNS_FROM_SUMS, always("async/staleness_max", 0, 2), checkpoints("000000", "final")),
    ),
    Row(
        "4c",
        "recipes.math_rl.train",
        f"{ARITHMETIC} loss_fn=cispo stream_minibatch_config.groups_per_batch=4 "
        "stream_minibatch_config.num_minibatches=2",
        TINY,
        "cispo, gradients accumulated as samples come in",
        (*LEARNS_FROM_SUMS, moves("sampling_client/step_max"), checkpoints("final")),
    ),
    Row(
        "5",
        "recipes.multiplayer_rl.guess_number.train",
        f"{M} batch_size=4 group_size=2 max_tokens=8 max_steps=2 eval_every=0",
        TINY,
        "many turns; the prompt prefix is cached",
        (logs(REWARD, 2), on_policy, above("env/all/turns_per_episode", 1), above("tokens/prefill_cached", 0)),
    ),
    Row(
        "6",
        "recipes.multiplayer_rl.twenty_questions.train",
        f"{GAME_SIZES} batch_size=2 group_size=2 num_epochs=1",
        GAMES,
        "two samplers of two base models",
        (logs(REWARD, 1), on_policy, above("env/all/turns_per_episode", 1), checkpoints("final")),
        quick=False,
    ),
    Row(
        "7",
        "recipes.multiplayer_rl.text_arena.train",
        f"{GAME_SIZES} batch_size=4 num_train_datapoints=16 num_test_datapoints=4",
        GAME,
        "self-play",
        # A game has a winner and a loser, so every group is mixed.
        (on_policy, always("env/all/by_group/frac_mixed", 1, 1), learns_from_contrast, checkpoints("final")),
        quick=False,
    ),
    Row(
        "9",
        "recipes.rl_loop",
        RL_LOOP,
        BASE,
        "the low-level loop with stable_reinforce",
        (logs("reward/total", 2), always("reward/total", 0.01, 0.99), checkpoints("final")),
    ),
    *(
        Row(
            f"9-{loss_fn}",
            "recipes.rl_loop",
            f"{RL_LOOP} loss_fn={loss_fn}",
            BASE,
            f"the low-level loop with {loss_fn}",
            (logs("reward/total", 2), always("reward/total", 0.01, 0.99), checkpoints("final")),
            quick=False,
        )
        for loss_fn in ("importance_sampling", "cispo", "gspo")
    ),
    Row(
        "11",
        "recipes.rl_basic",
        "model_name=Qwen/Qwen3-8B-Base max_steps=1 max_tokens=16",
        BASE,
        "2048 samples of 128 problems at once",
        (always("env/all/total_episodes", 2048, 2048), *LEARNS_FROM_BOXES),
        quick=False,
    ),
    Row(
        "20",
        "recipes.rl_numerics_check.train",
        "model_name=Qwen/Qwen3-8B renderer_name=qwen3_disable_thinking groups_per_batch=1 group_size=2 max_tokens=16 "
        "max_steps=1 task.page_chars=100 task.num_pages_min=2 task.num_pages_max=3",
        SMALL,
        "trainer and sampler agree on long prompts with tools",
        (on_policy, above("env/all/ob_tokens_per_turn", 500), checkpoints("final")),
    ),
    *(
        Row(
            f"23-{env}",
            "recipes.math_rl.train",
            f"env={env} {BOXED} max_steps=1 eval_every=0 loss_fn={loss_fn}",
            BASE,
            f"{loss_fn} on {env}",
            LEARNS_FROM_BOXES,
            quick=False,
        )
        for env, loss_fn in (("gsm8k", "importance_sampling"), ("deepmath", "dro"), ("polaris", "ppo"))
    ),
    Row(
        "24",
        "recipes.rubric.train",
        f"{GAME_SIZES.replace('eval_every=0', 'eval_every=1')} grader_llm_name=Qwen/Qwen3.5-9B "
        "grader_renderer_name=role_colon train_jsonl_path=rubric_train.jsonl test_jsonl_path=rubric_test.jsonl "
        "train_group_size=2 groups_per_batch=2",
        GAMES,
        "a model that grades another",
        (logs("env/all/rubric_score", 1), logs("test/env/all/rubric_score", 2), on_policy, checkpoints("final")),
        quick=False,
    ),
)

PREFERENCE = (
    Row(
        "12",
        "recipes.preference.dpo.train",
        f"{M} dataset=hhh batch_size=4 max_steps=2",
        TINY,
        "a loss of the client's own, reference logprobs",
        # Before the first step the policy is its own reference, and the loss of a tie is log 2.
        (
            logs("dpo_loss", 2),
            first("dpo_loss", math.log(2) - 1e-6, math.log(2) + 1e-6),
            falls("dpo_loss"),
            checkpoints("final"),
        ),
    ),
    Row(
        "13",
        "recipes.preference.shorter.train",
        f"{M} batch_size=2 group_size=4 max_tokens=8 max_steps=1 eval_every=0",
        TINY,
        "rewards from pairs",
        # It is a zero-sum game.
        (logs(REWARD, 1), always("env/all/win_minus_loss", -1e-9, 1e-9), on_policy, checkpoints("final")),
        quick=False,
    ),
    Row(
        "14",
        "recipes.preference.rlhf.rlhf_pipeline",
        "base_model=Qwen/Qwen3-8B-Base short_name=q3 batch_size=4 max_steps=1 rl_max_tokens=8 rl_group_size=2 "
        "eval_every=0",
        BASE,
        "three stages; the last loads a checkpoint of each kind",
        (
            at(f"{RUNS}/rlhf-q3/sft", logs("train_mean_nll", 1), checkpoints("final")),
            at(f"{RUNS}/rlhf-q3/rm", logs("train_mean_nll", 1), checkpoints("final")),
            at(f"{RUNS}/rlhf-q3/rl", logs(REWARD, 1), on_policy, checkpoints("final")),
        ),
        takes_log_path=False,
    ),
)

DISTILLATION = (
    Row(
        "15",
        "recipes.distillation.on_policy_distillation",
        "model_name=local/tiny teacher_model=local/tiny renderer_name=role_colon dataset=deepmath groups_per_batch=2 "
        "group_size=2 max_tokens=8 max_steps=2 eval_every=0",
        TINY,
        "a teacher's logprobs",
        # The student starts equal to its teacher and differs after a step.
        (on_policy, first("teacher_kl", -1e-5, 1e-5), moves("teacher_kl"), checkpoints("final")),
    ),
    Row(
        "16",
        "recipes.distillation.on_policy_multi_teacher",
        f"{M} deepmath_teacher_model=local/tiny tulu3_teacher_model=Qwen/Qwen3-8B deepmath_groups_per_batch=2 "
        "tulu3_groups_per_batch=2 group_size=2 max_tokens=8 max_steps=1",
        (*TINY, *SMALL),
        "two teachers of two base models",
        (
            on_policy,
            first("teacher_kl/dataset_0", -1e-5, 1e-5),
            first("teacher_kl/dataset_1", -1e-5, 1e-5),
            checkpoints("final"),
        ),
        quick=False,
    ),
    Row(
        "18",
        "recipes.sdft.train",
        SDFT,
        SMALL,
        "top-k logprobs of the prompt, cross_entropy over k targets",
        (always("sdft/topk", 3, 3), above("sdft/mean_teacher_entropy", 0), above("grad_norm", 0), checkpoints("final")),
    ),
    Row(
        "18a",
        "recipes.sdft.train",
        f"{SDFT} reverse=True",
        SMALL,
        "the reverse divergence, by a loss of the client's own",
        (
            logs("sdft/reverse_kl_mean", 2),
            above("sdft/reverse_kl_mean", 0),
            above("grad_norm", 0),
            checkpoints("final"),
        ),
        quick=False,
    ),
)

# Scripts that only sample: they log no metrics, so their output is checked.
SAMPLING = (
    Row(
        "25",
        "recipes.true_thinking_score.analyze",
        "model_name=Qwen/Qwen3.5-4B renderer_name=role_colon dataset=gsm8k n_problems=2 max_tokens=32",
        GAME,
        "logprobs of answers after perturbed thoughts",
        (says("Per-problem:"),),
        quick=False,
    ),
    Row(
        "28",
        "recipes.decisions.demo",
        "model_name=Qwen/Qwen3-8B",
        SMALL,
        "a probability for each of some choices, by target_prompt_logprobs",
        (says('"billing": '), says('"cookbook": ')),
        quick=False,
        takes_log_path=False,
        standard_input="How do I choose a learning rate?\n\n",
    ),
    Row(
        "29",
        "recipes.prompt_distillation.create_data",
        "output_file=languages.jsonl",
        LANGUAGES,
        "long answers to long prompts, many at once",
        (says("Saved data to languages.jsonl"),),
        quick=False,
        takes_log_path=False,
    ),
    Row(
        "26",
        "eval.custom_evaluators",
        "",
        ("Qwen/Qwen3.5-9B",),
        "an evaluator of one's own",
        (says("{'accuracy': "),),
        quick=False,
        takes_log_path=False,
    ),
    Row(
        "27",
        "chat_app.tinker_chat_cli",
        "base_model=Qwen/Qwen3-8B-Base max_tokens=16",
        BASE,
        "a conversation with a model",
        (says("Assistant: "),),
        quick=False,
        takes_log_path=False,
        standard_input="What is 1 + 2?\nquit\n",
    ),
)

ROWS: tuple[Row, ...] = (*SUPERVISED, *REINFORCEMENT, *PREFERENCE, *DISTILLATION, *SAMPLING)
