#include "core/roll_call.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {

namespace {

using Kind = StoreAction::Kind;
using Actions = std::vector<StoreAction>;
using Values = std::map<std::string, std::string>;

constexpr const char* kCall = "call";
constexpr const char* kVerdict = "verdict";
constexpr const char* kHeard = "heard";

struct Call {
  int64_t rank = 0;
  bool is_late = false;
  Verdict verdict;  // what of it the caller knows
};

struct Answer {
  bool is_at_work = false;
  std::string text;
};

void put_call(WireWriter& out, const Verdict& call) {
  for (const std::string* text : {&call.operation, &call.path, &call.phase, &call.doing, &call.why}) {
    out.put_string(*text);
  }
}

void get_call(WireReader& in, Verdict& call) {
  call.operation = in.get_string("operation");
  call.path = in.get_string("path");
  call.phase = in.get_string("phase");
  call.doing = in.get_string("doing");
  call.why = in.get_string("why");
}

std::string encode(const Call& call) {
  WireWriter out;
  out.put_signed(call.rank);
  out.put(call.is_late);
  put_call(out, call.verdict);
  return out.take();
}

Call decode_call(std::string_view bytes) {
  WireReader in(bytes, "call");
  Call call;
  call.rank = in.get_signed("rank");
  call.is_late = in.get("is_late") != 0;
  get_call(in, call.verdict);
  in.finish();
  return call;
}

std::string encode(const Answer& answer) {
  WireWriter out;
  out.put(answer.is_at_work);
  out.put_string(answer.text);
  return out.take();
}

Answer decode_answer(std::string_view bytes) {
  WireReader in(bytes, "answer");
  Answer answer;
  answer.is_at_work = in.get("is_at_work") != 0;
  answer.text = in.get_string("text");
  in.finish();
  return answer;
}

std::string encode(const Verdict& verdict) {
  WireWriter out;
  put_call(out, verdict);
  out.put_sizes(verdict.silent);
  out.put(verdict.late.size());
  for (const auto& [rank, text] : verdict.late) {
    out.put_signed(rank);
    out.put_string(text);
  }
  out.put_signed(verdict.num_answers);
  return out.take();
}

Verdict decode_verdict(std::string_view bytes) {
  WireReader in(bytes, "verdict");
  Verdict verdict;
  get_call(in, verdict);
  verdict.silent = in.get_sizes("silent");
  for (size_t left = in.get_count("late", 2); left > 0; --left) {
    const int64_t rank = in.get_signed("rank");
    verdict.late.emplace_back(rank, in.get_string("text"));
  }
  verdict.num_answers = in.get_signed("num_answers");
  in.finish();
  return verdict;
}

std::string encode_failure(int64_t position, std::string_view error) {
  WireWriter out;
  out.put_signed(position);
  out.put_string(error);
  return out.take();
}

std::pair<int64_t, std::string> decode_failure(std::string_view bytes) {
  WireReader in(bytes, "failed");
  const int64_t position = in.get_signed("position");
  std::pair<int64_t, std::string> failure{position, in.get_string("error")};
  in.finish();
  return failure;
}

StoreAction set(std::string key, std::string value) { return {Kind::kSet, {std::move(key)}, std::move(value)}; }
StoreAction compare_set(std::string key, std::string value) {
  return {Kind::kCompareSet, {std::move(key)}, std::move(value)};
}
StoreAction wait_for(double seconds) { return {.kind = Kind::kWait, .seconds = seconds}; }

Actions operator+(Actions first, const Actions& then) {
  first.insert(first.end(), then.begin(), then.end());
  return first;
}

}  // namespace

double poll_seconds(int64_t rank) {
  return kPollSeconds * (0.75 + 0.5 * std::fmod(static_cast<double>(rank) * 0.618034, 1.0));
}

RollCall::RollCall(std::string operation, std::string path, int64_t rank, std::vector<int64_t> ranks,
                   double timeout_seconds, double now, double answer_seconds)
    : operation_(std::move(operation)),
      path_(std::move(path)),
      rank_(rank),
      ranks_(std::move(ranks)),
      timeout_seconds_(timeout_seconds),
      answer_seconds_(answer_seconds) {
  TTE_CHECK(std::find(ranks_.begin(), ranks_.end(), rank_) != ranks_.end(), "RollCall", "rank ", rank_,
            " is not in the group, please report");
  begin(now, "", "it began; nothing was changed");
}

void RollCall::begin(double now, std::string phase, std::string doing) {
  standing_ = {std::move(phase), std::move(doing), now, true, ""};
  deadline_.reset();
  exchange_.reset();
}

void RollCall::wait(double now) {
  standing_.is_at_work = false;
  if (!deadline_) deadline_ = now + timeout_seconds_;
}

void RollCall::enter_exchange(std::string name) {
  exchange_ = std::make_shared<Exchange>();
  exchange_->name = std::move(name);
}

bool RollCall::leave_exchange(std::optional<std::string> error) {
  if (!exchange_) return false;
  exchange_->is_out = true;
  exchange_->own_error = std::move(error);
  return exchange_->failure.has_value();
}

std::optional<std::pair<int64_t, std::string>> RollCall::failure() const {
  return exchange_ ? exchange_->failure : std::nullopt;
}

bool RollCall::has_work() const {
  const bool is_untold = exchange_ && exchange_->own_error && !exchange_->failure;
  return asked_ == Asked::kNothing && (is_closed_ || is_asked_ || reason_ || is_untold);
}

bool RollCall::is_fresh(double now) {
  if (last_quiet_ && *last_quiet_ >= now - kFreshSeconds) return true;
  is_asked_ = true;
  return false;
}

Actions RollCall::next(double now, const Seen& seen) {
  switch (asked_) {
    case Asked::kNothing:
      if (is_closed_ && !reason_) return {{Kind::kEnd}};
      asked_at_ = now;
      return share_failure();
    case Asked::kFailure:
      for (const auto& [_, value] : std::get<Values>(seen)) {
        shared_->failure = decode_failure(value);
        // Others come out when their time is up, and it began later.
        if (shared_ == exchange_ && deadline_) deadline_ = now + timeout_seconds_ + patience_seconds();
      }
      return share_end();
    case Asked::kAllOut:
      shared_->all_are_out = std::get<bool>(seen);
      return ask_for_call();
    case Asked::kCall:
      return hear_call(now, std::get<Values>(seen));
    case Asked::kVerdict:
      return hear_verdict(now, std::get<Values>(seen));
    case Asked::kAllAnswers:
      if (!std::get<bool>(seen)) return poll_verdict();
      asked_ = Asked::kAnswers;
      return {{Kind::kRead, keys_of_ranks("answer/")}};
    case Asked::kAnswers:
      return count(std::get<Values>(seen));
    case Asked::kHeard:
      return linger(now, std::get<int64_t>(seen));
  }
  return {};
}

Actions RollCall::read(std::string key, Asked asked) {
  asked_ = asked;
  return {{Kind::kRead, {std::move(key)}}};
}

// Announces this rank's error, and asks for that of another rank.
Actions RollCall::share_failure() {
  shared_ = exchange_;
  if (!shared_ || shared_->failure) return share_end();
  const std::string key = "failed/" + shared_->name;
  Actions actions;
  if (shared_->own_error) {
    const auto position = std::find(ranks_.begin(), ranks_.end(), rank_) - ranks_.begin();
    actions.push_back(compare_set(key, encode_failure(position, *shared_->own_error)));
  }
  return actions + read(key, Asked::kFailure);
}

// Tells, where a rank has failed, that this one is out, and asks whether all are.
Actions RollCall::share_end() {
  if (!shared_ || !shared_->failure || !shared_->is_out) return ask_for_call();
  const std::string prefix = "out/" + shared_->name + "/";
  Actions actions = {set(prefix + std::to_string(rank_), "")};
  if (!shared_->own_error) return actions + ask_for_call();
  asked_ = Asked::kAllOut;
  actions.push_back({Kind::kHasAll, keys_of_ranks(prefix)});
  return actions;
}

Actions RollCall::ask_for_call() {
  if (read_verdict_) {  // what was announced by then has been heard
    verdict_ = read_verdict_;
    asked_ = Asked::kHeard;
    return {{Kind::kRaise}, {.kind = Kind::kAdd, .keys = {kHeard}, .number = 1}};
  }
  Actions actions;
  if (reason_) {
    const auto& [why, is_late] = *reason_;
    const Verdict known{operation_, path_, standing_.phase, standing_.doing, why, {}, {}, 0};
    actions.push_back(compare_set(kCall, encode({rank_, is_late, known})));
  }
  return actions + read(kCall, Asked::kCall);
}

Actions RollCall::hear_call(double now, const Values& seen) {
  const auto found = seen.find(kCall);
  if (found == seen.end()) {
    last_quiet_ = asked_at_;
    is_asked_ = false;
    asked_ = Asked::kNothing;
    const bool has_failed = exchange_ && exchange_->failure;
    return {wait_for(has_failed ? kAnswerPollSeconds : poll_seconds(rank_))};
  }
  call_ = found->second;
  is_caller_ = decode_call(call_).rank == rank_;
  count_at_ = now + answer_seconds_ + (is_caller_ ? 0 : kTakeOverSeconds);
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.0f", now - standing_.since);
  const std::string key = standing_.key.empty() ? "" : standing_.key + ", ";
  const Answer answer{standing_.is_at_work,
                      concat(standing_.phase, ", ", key, "for ", std::string_view(seconds), " s")};
  return Actions{set("answer/" + std::to_string(rank_), encode(answer))} + read(kVerdict, Asked::kVerdict);
}

Actions RollCall::hear_verdict(double now, const Values& seen) {
  const auto found = seen.find(kVerdict);
  if (found != seen.end()) {
    read_verdict_ = decode_verdict(found->second);
    return share_failure();
  }
  if (now <= count_at_ && !is_caller_) return poll_verdict();
  const bool is_time = now > count_at_;
  asked_ = is_time ? Asked::kAnswers : Asked::kAllAnswers;
  return {{is_time ? Kind::kRead : Kind::kHasAll, keys_of_ranks("answer/")}};
}

Actions RollCall::poll_verdict() { return Actions{wait_for(kAnswerPollSeconds)} + read(kVerdict, Asked::kVerdict); }

// The verdict: ranks that are silent, and ranks that the caller waited for in vain.
Actions RollCall::count(const Values& answers) {
  const Call call = decode_call(call_);
  Verdict verdict = call.verdict;
  for (const int64_t rank : ranks_) {
    const auto found = answers.find("answer/" + std::to_string(rank));
    if (found == answers.end()) {
      verdict.silent.push_back(rank);
      continue;
    }
    ++verdict.num_answers;
    Answer answer = decode_answer(found->second);
    if (call.is_late && answer.is_at_work) verdict.late.emplace_back(rank, std::move(answer.text));
  }
  return Actions{compare_set(kVerdict, encode(verdict))} + read(kVerdict, Asked::kVerdict);
}

// Keeps rank 0, which hosts the store, until all ranks that answered have read the verdict.
Actions RollCall::linger(double now, int64_t num_heard) {
  if (!linger_until_) linger_until_ = now + kLingerSeconds;
  if (rank_ != 0 || num_heard >= verdict_->num_answers || now >= *linger_until_) return {{Kind::kEnd}};
  return {wait_for(kAnswerPollSeconds), {.kind = Kind::kAdd, .keys = {kHeard}, .number = 0}};
}

std::vector<std::string> RollCall::keys_of_ranks(const std::string& prefix) const {
  std::vector<std::string> keys;
  for (const int64_t rank : ranks_) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

}  // namespace torchtitan_ext::core
