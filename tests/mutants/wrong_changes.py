"""Wrong changes written by hand: each is a bug that a person could make, and that a reader of the code might pass over.

``make mutants`` makes each of them in a copy of the tree and runs its judges: files or single tests of pytest, or names
of C++ test programs. The old text stands exactly once in its file, which ``tests/test_mutants.py`` checks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Tier = Literal["commit", "nightly"]


class WrongChange(NamedTuple):
    """A bug, and what finds it.

    Attributes:
        old: The text of the file that is replaced.
        new: What replaces it.
        judges: The tests that should fail, the quickest first.
        tier: The tier of the suite in which they run.
    """

    name: str
    file: str
    old: str
    new: str
    judges: tuple[str, ...]
    tier: Tier = "commit"


DECIDERS = "torchtitan_ext/checkpoint"
PLANNERS = "tests/checkpoint/planners"
STORAGE = "torchtitan_ext/storage"
COMMIT = "tests/storage/commit"
DATA = "torchtitan_ext/elastic/data"
TESTS_OF_DATA = "tests/elastic/data"
POWER = f"{COMMIT}/test_power.py::test_what_was_committed_is_never_lost"

WRONG_CHANGES = [
    # ---- what ranks say of their keys, and the rules of a load ----
    WrongChange(
        "tensors on a part of the world are not compared",
        f"{DECIDERS}/tables/key_table.py",
        "elif is_replicated(entry.report) or is_on_part(entry.report, world_size):",
        "elif is_replicated(entry.report):",
        (f"{PLANNERS}/test_replica_digests.py::test_pipelines",),
    ),
    WrongChange(
        "a save does not miss a rank of a mesh",
        f"{DECIDERS}/tables/agreement.py",
        "joint.agree(needs_all_ranks)",
        "joint.agree(False)",
        ("tests/checkpoint/tables/test_agreement.py::test_a_rank_of_the_mesh_that_does_not_report",),
    ),
    WrongChange(
        "each shard passes for a replica of its own",
        f"{DECIDERS}/tables/tensor_sums.py",
        "zip(report.coordinate, report.placements, strict=True) if dim < 0)",
        "zip(report.coordinate, report.placements, strict=True) if dim >= 0)",
        ("tests/test_fingerprints.py::test_equal_on_every_mesh_and_in_one_process",),
    ),
    WrongChange(
        "one memory in two layouts counts as tied",
        f"{DECIDERS}/tables/tied_keys.py",
        "if first != fqn and _layout_of(entries[first]) == _layout_of(entry):",
        "if first != fqn:",
        (f"{PLANNERS}/test_tied_targets.py::test_one_memory_in_two_layouts_is_no_tie",),
    ),
    WrongChange(
        "a cast that loses values counts as exact",
        f"{DECIDERS}/rules/casts.py",
        "if is_exact(source, target):",
        "if is_exact(target, source):",
        (f"{PLANNERS}/test_cast.py::test_each_policy_allows_what_the_stricter_one_does",),
    ),
    WrongChange(
        "a parameter group takes the options of the saved group at its position",
        f"{DECIDERS}/rules/param_groups.py",
        "_merged_group(index, saved[sources[0]], group, own)",
        "_merged_group(index, saved[min(index, len(saved) - 1)], group, own)",
        ("tests/checkpoint/rules/test_param_groups.py::test_new_and_removed_groups",),
    ),
    WrongChange(
        "positions in data depend on all ranks in place of the data-parallel ones",
        f"{DECIDERS}/rules/data_positions.py",
        "return old.size != new.size if None in counts else counts[0] != counts[1]",
        "return old.size != new.size",
        ("tests/checkpoint/rules/test_data_positions.py::test_the_data_parallel_ranks_count_where_meshes_tell_them",),
    ),
    # ---- planners ----
    WrongChange(
        "of replicas that differ any holder's bits are saved",
        f"{DECIDERS}/planners/save_planner.py",
        "lowest = sorted(agreement.number_of[problem.fqn] for problem in compared.differing)",
        "lowest = sorted(agreement.number_of[problem.fqn] for problem in compared.presumed)",
        (
            f"{PLANNERS}/test_save_planner.py::test_plain_tensors_that_differ_are_warned_of_and_the_lowest_rank_is_saved",
        ),
    ),
    WrongChange(
        "a load does not look whether the files have all chunks",
        f"{DECIDERS}/planners/load_planner.py",
        "found += storage_problems(self.metadata, set(joint.wanted.values()))",
        "found += storage_problems(self.metadata, ())",
        (f"{PLANNERS}/test_saved_chunks.py::test_a_load_refuses_what_the_metadata_shows",),
    ),
    WrongChange(
        "a rank that reads metadata of its own fills a part of its target",
        f"{DECIDERS}/planners/load_planner.py",
        "elif not decision.is_cover_checked:",
        "elif decision.is_cover_checked:",
        (
            f"{PLANNERS}/test_load_planner.py::test_without_collectives_another_mesh_is_refused_by_the_rank_that_lacks_elements",
        ),
    ),
    WrongChange(
        "a chunk that is in no file is not missed",
        f"{DECIDERS}/planners/saved_chunks.py",
        "return problems if num_chunks == len(entries) else",
        "return problems if num_chunks >= len(entries) else",
        (f"{PLANNERS}/test_saved_chunks.py::test_a_load_refuses_what_the_metadata_shows",),
    ),
    WrongChange(
        "a target whose elements share memory is filled",
        f"{DECIDERS}/planners/targets.py",
        "and not targets[fqn].is_meta and not may_overlap_itself(targets[fqn]):",
        "and not targets[fqn].is_meta:",
        ("tests/distributed/test_drop_in.py::test_targets_that_share_memory_with_themselves",),
    ),
    # ---- storage ----
    WrongChange(
        "the index and the metadata are not synced",
        f"{STORAGE}/checkpoint_files.py",
        "        if sync:\n            os.fsync(stream.fileno())",
        "        if sync:\n            stream.flush()",
        (POWER,),
    ),
    WrongChange(
        "an index belongs to any metadata of the same length",
        f"{STORAGE}/checkpoint_files.py",
        "if (index.metadata_bytes, index.metadata_digest) != (len(metadata), _core.digest(metadata)):",
        "if index.metadata_bytes != len(metadata):",
        ("tests/storage/inspect/test_damage.py::test_an_index_of_another_save_of_the_same_shapes_is_left_aside",),
    ),
    WrongChange(
        "a footer is not compared with the index",
        f"{STORAGE}/commit/opened.py",
        "return _core.has_footer(file, descriptor)",
        "return True",
        ("tests/storage/inspect/test_damage.py::test_an_index_of_another_save_of_the_same_shapes_is_left_aside",),
    ),
    WrongChange(
        "a file of another save is read with this one's index",
        f"{STORAGE}/native/verified_files.py",
        'save_id = b"" if self._index is None else self._index.save_id',
        'save_id = b""',
        ("tests/storage/inspect/test_damage.py::test_a_file_of_another_save_of_the_same_shapes_is_found",),
    ),
    WrongChange(
        "metadata that was changed travels as the file that it came from",
        f"{STORAGE}/metadata/lazy_metadata.py",
        "if name in _CHANGING:",
        'if name in ("clear", "popitem"):',
        ("tests/storage/metadata/test_lazy_metadata.py::test_any_field_that_was_changed_is_sent",),
    ),
    # ---- commit ----
    WrongChange(
        "the names in the stage are not synced before the rename",
        f"{STORAGE}/commit/commit.py",
        "        if sync:\n            sync_directory(directory)\n        confirm()",
        "        confirm()",
        (POWER,),
    ),
    WrongChange(
        "the names of new directories above the target are not synced",
        f"{STORAGE}/commit/commit.py",
        "[target.parent if self.place.is_staged else target, *self._new_parents]",
        "[target.parent if self.place.is_staged else target]",
        (f"{COMMIT}/test_power.py::test_the_names_of_new_directories_are_synced",),
    ),
    WrongChange(
        "a save commits although another one has taken it for dead",
        f"{STORAGE}/commit/commit.py",
        "        self._lock.check()\n",
        "",
        (f"{COMMIT}/test_commit.py::test_who_was_taken_for_dead_does_not_commit",),
    ),
    WrongChange(
        "files are removed although the rename may have taken effect",
        f"{STORAGE}/commit/commit.py",
        "self._may_be_committed = not _holds(written, content)",
        "self._may_be_committed = False",
        (f"{COMMIT}/test_commit.py::test_where_nobody_can_say_whether_a_rename_took_effect_nothing_is_removed",),
    ),
    WrongChange(
        "a lock of another container counts as one of this machine",
        f"{STORAGE}/commit/save_lock.py",
        "(owner.machine, owner.host) == (_machine(), socket.gethostname())",
        "owner.host == socket.gethostname()",
        (f"{COMMIT}/test_save_lock.py::test_containers_and_copies_of_machines_are_others",),
    ),
    WrongChange(
        "who releases a lock removes that of its successor",
        f"{STORAGE}/commit/save_lock.py",
        "        if state is not None and state.owner == self.owner:\n            self.path.unlink(missing_ok=True)",
        "        if state is not None:\n            self.path.unlink(missing_ok=True)",
        (f"{COMMIT}/test_save_lock.py::test_the_lock_of_who_took_over_first_stays",),
    ),
    WrongChange(
        "two versions of an object are one if they have one size",
        f"{STORAGE}/objects/folder.py",
        "(self.tag, self.num_bytes) == (other.tag, other.num_bytes)",
        "self.num_bytes == other.num_bytes",
        ("tests/remote/test_object_commits.py::test_of_two_savers_one_wins",),
        "nightly",
    ),
    WrongChange(
        "a clean-up takes a living save's lease",
        f"{STORAGE}/objects/leftovers.py",
        "    if _seconds(stamp.put_at, now) <= seconds:\n        return False\n",
        "",
        ("tests/remote/test_object_commits.py::test_a_store_that_does_not_say",),
        "nightly",
    ),
    # ---- sync ----
    WrongChange(
        "a rank that sends no batch is not missed",
        "torchtitan_ext/sync/same_call.py",
        "return all(len(set(of_batch)) == 1 and len(of_batch) == of_batch[0][0] for of_batch in members.values())",
        "return all(len(set(of_batch)) == 1 for of_batch in members.values())",
        ("tests/sync/test_same_call.py::test_modules_that_differ",),
    ),
    WrongChange(
        "buffers that are not persistent are forgotten",
        "torchtitan_ext/sync/tensors.py",
        'if call.buffers == "all" or fqn not in transient:',
        "if fqn not in transient:",
        ("tests/sync/test_sync.py::test_pure_ddp_and_options",),
    ),
    WrongChange(
        "tensors on some meshes pass for replicas on all",
        "torchtitan_ext/sync/slices.py",
        "if len({tensor.kind for tensor in tensors}) == 1 and len(tensors) == tensors[0].num_peers",
        "if len({tensor.kind for tensor in tensors}) == 1",
        ("tests/sync/test_check.py::test_what_not_all_ranks_hold_is_presumed_of_none",),
    ),
    WrongChange(
        "tensors of one mesh are replicas on the axes of the first of them",
        "torchtitan_ext/sync/replicas.py",
        "key = (id(mesh), placements, is_joined)",
        "key = (id(mesh), is_joined)",
        ("tests/sync/test_sync.py::test_odd_replicas",),
    ),
    # ---- elastic data ----
    WrongChange(
        "padding is counted by the batch that follows",
        f"{DATA}/sampler.py",
        "np.searchsorted(own_places, start.num_left - (batch - 1) * size)",
        "np.searchsorted(own_places, start.num_left - batch * size)",
        (f"{TESTS_OF_DATA}/test_sampler.py::test_every_sample_once_across_restarts",),
    ),
    WrongChange(
        "samples of a batch that nobody got count as served",
        f"{DATA}/virtual_shards.py",
        "shard.state = replace(shard.state, taken=before.state.taken, total=before.state.total)",
        "shard.state = replace(shard.state, taken=before.state.taken)",
        (f"{TESTS_OF_DATA}/test_virtual_shards.py::test_the_end_of_an_epoch_counts_what_was_served",),
    ),
    WrongChange(
        "a state goes on from its mark and gives the samples since again",
        f"{DATA}/virtual_shards.py",
        "stream=self.mark.stream, since=self.state.total - self.mark.total)",
        "stream=self.mark.stream, since=0)",
        (f"{TESTS_OF_DATA}/test_stream_batches.py::test_no_sample_is_lost_or_repeated_across_restarts",),
    ),
    WrongChange(
        "all shards that one is dealt to get its first part",
        f"{DATA}/stream_batches.py",
        "split[shard % num_saved][shard // num_saved]",
        "split[shard % num_saved][0]",
        (f"{TESTS_OF_DATA}/test_packing.py::test_no_token_is_lost_across_worlds_epochs_and_splits",),
    ),
    WrongChange(
        "the tokens left over are given to each part of a shard",
        f"{DATA}/packing.py",
        "(packed if part == 0 else packed_state())",
        "(packed if part >= 0 else packed_state())",
        (f"{TESTS_OF_DATA}/test_packing.py::test_no_token_is_lost_across_worlds_epochs_and_splits",),
    ),
    WrongChange(
        "all ranks of a new world draw the same numbers",
        "torchtitan_ext/elastic/rng.py",
        "spawn_key=(step, self.rank)",
        "spawn_key=(step,)",
        ("tests/elastic/test_rng.py::test_seeds_depend_on_seed_step_and_rank_only",),
    ),
    # ---- operators ----
    WrongChange(
        "the gradient of what is overwritten is not zero",
        "torchtitan_ext/ops/shards.py",
        "grad_dst = _UNPACK_SHARD((grad, ctx.dst_offsets, torch.zeros_like(grad_shard), ctx.chunks))",
        "grad_dst = _UNPACK_SHARD((grad, ctx.dst_offsets, grad_shard, ctx.chunks))",
        ("tests/test_ops.py::test_gradients",),
    ),
    # ---- C++: deciders ----
    WrongChange(
        "ranks of all shards of dim 0 hold the same",
        "csrc/core/agreement.cpp",
        "if (kind.placements[axis].dim < 0) first[axis] = 0;",
        "if (kind.placements[axis].dim <= 0) first[axis] = 0;",
        ("test_agreement",),
    ),
    WrongChange(
        "meshes of one form on other ranks are one replica",
        "csrc/core/agreement.cpp",
        "const std::tuple key{kind_of(member).layout, is_plain ? 0 : standing(member).origin, alone};",
        "const std::tuple key{kind_of(member).layout, int64_t{0}, alone};",
        ("test_agreement",),
    ),
    WrongChange(
        "all unusual local sizes are the first ones",
        "csrc/core/agreement.cpp",
        "facts.add(chain, {0, Fact::kUnusual, static_cast<uint32_t>(rank), found->second});",
        "facts.add(chain, {0, Fact::kUnusual, static_cast<uint32_t>(rank), 0});",
        (
            "tests/checkpoint/tables/test_agreement.py::"
            "test_keys_that_are_alike_but_for_their_sizes_have_readings_of_their_own",
        ),
    ),
    WrongChange(
        "a chunk that is there twice counts once",
        "csrc/core/cover.cpp",
        "corners.add(chunk.offsets, chunk.sizes, static_cast<int64_t>(end - begin));",
        "corners.add(chunk.offsets, chunk.sizes, 1);",
        ("test_cover",),
    ),
    WrongChange(
        "who gives to others counts as idle",
        "csrc/core/flow.cpp",
        "if (giving != wanting) loads.add(",
        "if (giving == wanting) loads.add(",
        ("test_flow",),
    ),
    WrongChange(
        "a rank that is left gives another one's box",
        "csrc/core/flow.cpp",
        "kept.chunks.push_back(supply.chunks[index]);",
        "kept.chunks.push_back(supply.chunks[0]);",
        ("test_flow",),
    ),
    WrongChange(
        "a box is put into the tensor with the number of its source",
        "csrc/core/transfer_plan.cpp",
        "target_side.add_box(move.dst_rank, move.src_rank, 0, move.dst_chunk, move.dst, move.sizes);",
        "target_side.add_box(move.dst_rank, move.src_rank, 0, move.src_chunk, move.dst, move.sizes);",
        ("test_transfer_plan",),
    ),
    WrongChange(
        "positions of keys are differences from the first",
        "csrc/core/transfer_plan.cpp",
        "      before = position_of[key];\n",
        "",
        ("test_transfer_plan",),
    ),
    WrongChange(
        "a split factor that no axis pays for is forgotten",
        "csrc/core/shard_layout.cpp",
        "is_paid ? 1 : placement.split_factor});",
        "1});",
        ("test_shard_layout",),
    ),
    WrongChange(
        "an empty local tensor fits any shard",
        "csrc/core/shard_layout.cpp",
        "return equal || (held_is_empty && local_is_empty);",
        "return equal || local_is_empty;",
        ("test_shard_layout",),
    ),
    WrongChange(
        "the last piece of a divided shard ends before its end",
        "csrc/core/write_plan.cpp",
        "const int64_t end = is_last ? *dim : std::min(",
        "const int64_t end = is_last ? *dim - 1 : std::min(",
        (f"{PLANNERS}/test_plan_oracle.py::test_large_replicas_are_divided_among_their_holders",),
    ),
    WrongChange(
        "of a class of keys the last rank alone decides whether replicas are equal",
        "csrc/core/replica_digests.cpp",
        "are_alike = are_alike && sum == of_first;",
        "are_alike = sum == of_first;",
        ("test_agreement",),
    ),
    # ---- C++: storage ----
    WrongChange(
        "a rank's file is not synced",
        "csrc/storage/record_writer.cpp",
        "if (options_.sync) file_->sync();",
        "if (options_.sync) file_->start_write_back(0, end_);",
        (POWER,),
    ),
    WrongChange(
        "a second call writes over what the first one wrote",
        "csrc/storage/file.cpp",
        "    offset += done;\n",
        "",
        ("test_storage_files",),
    ),
    WrongChange(
        "a block begins with the first bytes of its record",
        "csrc/storage/record_writer.cpp",
        "reinterpret_cast<const char*>(segment.address) + (from - segment.begin), num_bytes));",
        "reinterpret_cast<const char*>(segment.address) + (from - begin), num_bytes));",
        ("tests/storage/native/test_file_writer.py::test_any_number_of_threads_writes_the_same",),
    ),
    WrongChange(
        "the sum of a chunk does not depend on its place in the tensor",
        "csrc/storage/record_writer.cpp",
        "position += record.offsets[dim] * strides[dim];",
        "position += strides[dim] - strides[dim];",
        ("tests/storage/native/test_sums.py::test_bytes_that_come_in_parts",),
    ),
    WrongChange(
        "a record may end behind the file's records",
        "csrc/storage/index.cpp",
        "record.num_bytes <= footer_offset - record.offset;",
        "record.num_bytes <= footer_offset;",
        ("test_storage_formats",),
    ),
    WrongChange(
        "a block counts as verified whatever its checksum is",
        "csrc/storage/run_reader.cpp",
        "const bool is_right = !is_verified || digest == source.checksums.checksums.at(block);",
        "const bool is_right = !is_verified || digest != source.checksums.checksums.size();",
        ("test_storage_files",),
    ),
    # ---- C++: transfers and operators ----
    WrongChange(
        "a receiver takes flights in the order of a sender",
        "csrc/core/exchange_schedule.cpp",
        "const int64_t distance = (rank - exchange.receives[pair].peer + num_ranks) % num_ranks;",
        "const int64_t distance = (exchange.receives[pair].peer - rank + num_ranks) % num_ranks;",
        ("test_exchange_schedule",),
    ),
    WrongChange(
        "all boxes that a rank has for itself go to the first place",
        "csrc/dist/exchange.cpp",
        "const TensorBox& target = plan_.targets[first_target + index];",
        "const TensorBox& target = plan_.targets[first_target];",
        ("tests/test_exchange_runs.py::test_boxes_of_one_rank_without_a_group",),
    ),
    WrongChange(
        "ranks that expect other boxes do not hear of it",
        "csrc/dist/exchange_agreement.cpp",
        "  if (sum != 0) {",
        "  if (sum == 1) {",
        ("tests/test_exchange_runs.py::test_disagreements_are_the_same_error_on_all",),
    ),
    WrongChange(
        "all messages of a flight are packed at its beginning",
        "csrc/dist/broadcast.cpp",
        "const int64_t base = address_of(bucket_of(flight)) + message.flight_bytes;",
        "const int64_t base = address_of(bucket_of(flight));",
        ("tests/sync/test_broadcast.py::test_every_bit_arrives",),
    ),
    WrongChange(
        "the zeros of a gap overwrite the tensors before it",
        "csrc/ops/flatten.cpp",
        "    end = offset + view.num_bytes();\n",
        "    end = offset;\n",
        ("tests/test_ops.py::test_flatten_mixed_tensors",),
    ),
    WrongChange(
        "what a run has behind its last line is not copied",
        "csrc/ops/copy_runs_cpu.cpp",
        "  if (body < num_bytes) std::memcpy(dst + body, src + body, num_bytes - body);\n",
        "",
        ("tests/test_ops.py::test_runs_of_every_length",),
    ),
]
