#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <string>

#include "core/roll_call.h"

namespace torchtitan_ext::core {
namespace {

using Kind = StoreAction::Kind;
using Values = std::map<std::string, std::string>;

constexpr double kTimeout = 300;

// ---- One rank, call by call: what it is told, and what it does ----

std::string text_of(const StoreAction& action) {
  static const std::map<Kind, std::string> names = {{Kind::kSet, "set"},     {Kind::kCompareSet, "compare_set"},
                                                    {Kind::kAdd, "add"},     {Kind::kHasAll, "has_all"},
                                                    {Kind::kRead, "read"},   {Kind::kWait, "wait"},
                                                    {Kind::kRaise, "raise"}, {Kind::kEnd, "end"}};
  std::string text = names.at(action.kind);
  for (const std::string& key : action.keys) text += " " + key;
  if (action.kind == Kind::kAdd) text += " " + std::to_string(action.number);
  if (action.kind == Kind::kWait) text += action.seconds == kAnswerPollSeconds ? " short" : " long";
  return text;
}

std::string texts_of(const std::vector<StoreAction>& actions) {
  std::string texts;
  for (const StoreAction& action : actions) texts += (texts.empty() ? "" : ", ") + text_of(action);
  return texts;
}

std::string value_in(const std::vector<StoreAction>& actions, const std::string& key) {
  for (const StoreAction& action : actions) {
    if (!action.keys.empty() && action.keys[0] == key && !action.value.empty()) return action.value;
  }
  ADD_FAILURE() << "no value of " << key << " in: " << texts_of(actions);
  return "";
}

RollCall make_rank(int64_t rank, int64_t num_ranks) {
  std::vector<int64_t> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  RollCall one("save", "/step", rank, ranks, kTimeout, 0);
  one.begin(1, "write", "ranks wrote");
  return one;
}

TEST(RollCall, NothingHappens) {
  RollCall rank = make_rank(1, 3);
  EXPECT_FALSE(rank.has_answered());
  EXPECT_EQ(texts_of(rank.next(2, {})), "read call");
  EXPECT_FALSE(rank.is_fresh(2.5));
  const auto actions = rank.next(2.5, Values{});
  EXPECT_EQ(texts_of(actions), "wait long");
  EXPECT_EQ(actions[0].seconds, poll_seconds(1));
  EXPECT_TRUE(rank.has_answered());
  EXPECT_TRUE(rank.is_fresh(2 + kFreshSeconds));
  EXPECT_FALSE(rank.has_work());
  EXPECT_FALSE(rank.is_fresh(2.5 + kFreshSeconds));  // it counts from when the question was asked
  EXPECT_TRUE(rank.has_work());
  EXPECT_EQ(texts_of(rank.next(6, {})), "read call");
  EXPECT_FALSE(rank.has_work());
  rank.next(6, Values{});
  rank.close();
  EXPECT_TRUE(rank.has_work());
  EXPECT_EQ(texts_of(rank.next(7, {})), "end");
}

TEST(RollCall, ADeadlineCountsFromTheFirstWaitOfAPhase) {
  RollCall rank = make_rank(0, 2);
  EXPECT_EQ(rank.seconds_left(500), kTimeout);
  rank.wait(1000);
  rank.wait(1100);
  EXPECT_EQ(rank.seconds_left(1200), 100);
  rank.begin(1200, "commit", "ranks committed");
  EXPECT_EQ(rank.seconds_left(1300), kTimeout);
}

TEST(RollCall, TheCallerCountsWhenItsTimeIsUp) {
  RollCall caller = make_rank(0, 3), other = make_rank(2, 3);
  caller.wait(2);
  caller.next(10, {});
  caller.call("rank 0 waited", true);
  caller.next(10, Values{});  // asked before it gave up
  EXPECT_TRUE(caller.has_work());
  const auto call = caller.next(10, {});
  EXPECT_EQ(texts_of(call), "compare_set call, read call");
  const Values called = {{"call", value_in(call, "call")}};
  const auto own = caller.next(10, called);
  EXPECT_EQ(texts_of(own), "set answer/0, read verdict");

  other.at("model");
  other.next(11, {});
  const auto answer = other.next(11.4, called);
  EXPECT_EQ(texts_of(answer), "set answer/2, read verdict");
  EXPECT_EQ(texts_of(other.next(11.4, Values{})), "wait short, read verdict");

  EXPECT_EQ(texts_of(caller.next(12, Values{})), "has_all answer/0 answer/1 answer/2");
  EXPECT_EQ(texts_of(caller.next(12, false)), "wait short, read verdict");
  EXPECT_EQ(texts_of(caller.next(15, Values{})), "has_all answer/0 answer/1 answer/2");
  caller.next(15, false);
  EXPECT_EQ(texts_of(caller.next(15.1, Values{})), "read answer/0 answer/1 answer/2");
  const Values answers = {{"answer/0", value_in(own, "answer/0")}, {"answer/2", value_in(answer, "answer/2")}};
  const auto counted = caller.next(15.1, answers);
  EXPECT_EQ(texts_of(counted), "compare_set verdict, read verdict");
  EXPECT_FALSE(caller.verdict());
  const Values verdict = {{"verdict", value_in(counted, "verdict")}};
  EXPECT_EQ(texts_of(caller.next(15.1, verdict)), "raise, add heard 1");
  EXPECT_EQ(texts_of(other.next(15.2, verdict)), "raise, add heard 1");
  for (const RollCall* rank : {&caller, &other}) {
    ASSERT_TRUE(rank->verdict());
    EXPECT_EQ(rank->verdict()->why, "rank 0 waited");
    EXPECT_EQ(rank->verdict()->phase + " of " + rank->verdict()->path, "write of /step");
    EXPECT_EQ(rank->verdict()->silent, (std::vector<int64_t>{1}));
    EXPECT_EQ(rank->verdict()->late, (std::vector<std::pair<int64_t, std::string>>{{2, "write, model, for 10 s"}}));
  }

  // Rank 0 stays until both have heard; the other one goes.
  EXPECT_EQ(texts_of(caller.next(15.2, int64_t{1})), "wait short, add heard 0");
  EXPECT_FALSE(caller.has_work());
  EXPECT_EQ(texts_of(other.next(15.3, int64_t{2})), "end");
  EXPECT_EQ(texts_of(caller.next(15.3, int64_t{2})), "end");
}

TEST(RollCall, Rank0StaysForSoLong) {
  RollCall rank = make_rank(0, 1);
  rank.call("left", false);
  const auto call = rank.next(0, {});
  const auto answer = rank.next(0, Values{{"call", value_in(call, "call")}});
  EXPECT_EQ(texts_of(rank.next(0, Values{})), "has_all answer/0");
  EXPECT_EQ(texts_of(rank.next(0, true)), "read answer/0");
  const auto counted = rank.next(0, Values{{"answer/0", value_in(answer, "answer/0")}});
  EXPECT_EQ(texts_of(rank.next(0, Values{{"verdict", value_in(counted, "verdict")}})), "raise, add heard 1");
  EXPECT_TRUE(rank.verdict()->silent.empty() && rank.verdict()->late.empty());  // it left: nobody is late
  EXPECT_EQ(texts_of(rank.next(10, int64_t{0})), "wait short, add heard 0");
  EXPECT_EQ(texts_of(rank.next(12.9, int64_t{0})), "wait short, add heard 0");
  EXPECT_EQ(texts_of(rank.next(13, int64_t{0})), "end");
}

TEST(RollCall, ACallIsBroughtToItsEndAfterTheOperation) {
  RollCall rank = make_rank(1, 2);
  rank.call("rank 1 left", false);
  rank.close();
  EXPECT_EQ(texts_of(rank.next(5, {})), "compare_set call, read call");
}

TEST(RollCall, WhatNobodyCanReadIsRefused) {
  RollCall rank = make_rank(1, 2);
  rank.next(5, {});
  EXPECT_THROW(rank.next(5, Values{{"call", "\xff"}}), std::invalid_argument);
  EXPECT_THROW(RollCall("save", "", 7, {0, 1}, 1, 0), std::invalid_argument);
}

TEST(RollCall, AnErrorInAnExchangeIsAnnounced) {
  RollCall failed = make_rank(1, 2), other = make_rank(0, 2);
  for (RollCall* rank : {&failed, &other}) {
    rank->enter_exchange("x");
    EXPECT_EQ(texts_of(rank->next(2, {})), "read failed/x");
    EXPECT_EQ(texts_of(rank->next(2, Values{})), "read call");
    EXPECT_EQ(texts_of(rank->next(2, Values{})), "wait long");
    rank->wait(3);
  }
  EXPECT_FALSE(failed.leave_exchange("boom"));
  EXPECT_TRUE(failed.has_work());
  const auto told = failed.next(4, {});
  EXPECT_EQ(texts_of(told), "compare_set failed/x, read failed/x");
  const Values failure = {{"failed/x", value_in(told, "failed/x")}};
  EXPECT_EQ(texts_of(failed.next(4, failure)), "set out/x/1, has_all out/x/0 out/x/1");
  EXPECT_EQ(texts_of(failed.next(4, false)), "read call");
  EXPECT_EQ(texts_of(failed.next(4, Values{})), "wait short");
  EXPECT_FALSE(failed.has_work() || failed.all_are_out());
  // The others come out when their time is up, which began later.
  EXPECT_EQ(failed.seconds_left(4), kTimeout + failed.patience_seconds());

  other.next(5, {});
  EXPECT_EQ(texts_of(other.next(5, failure)), "read call");
  EXPECT_EQ(other.failure(), (std::pair<int64_t, std::string>{1, "boom"}));
  EXPECT_EQ(texts_of(other.next(5, Values{})), "wait short");
  EXPECT_TRUE(other.leave_exchange("an echo"));
  EXPECT_EQ(texts_of(other.next(6, {})), "set out/x/0, has_all out/x/0 out/x/1");
  EXPECT_EQ(texts_of(failed.next(6, {})), "set out/x/1, has_all out/x/0 out/x/1");
  failed.next(6, true);
  EXPECT_TRUE(failed.all_are_out());

  failed.begin(7, "next", "");
  EXPECT_FALSE(failed.failure() || failed.all_are_out() || failed.leave_exchange(std::nullopt));
}

// ---- Whole groups over one store ----

struct Store {
  Values values;
  std::map<std::string, int64_t> sums;

  Seen perform(const StoreAction& action) {
    switch (action.kind) {
      case Kind::kSet:
        values[action.keys[0]] = action.value;
        return {};
      case Kind::kCompareSet:
        values.emplace(action.keys[0], action.value);
        return {};
      case Kind::kAdd:
        return sums[action.keys[0]] += action.number;
      case Kind::kHasAll:
        return std::all_of(action.keys.begin(), action.keys.end(), [&](const auto& key) { return values.count(key); });
      case Kind::kRead: {
        Values seen;
        for (const std::string& key : action.keys) {
          if (values.count(key)) seen[key] = values[key];
        }
        return seen;
      }
      default:
        return {};
    }
  }
};

struct Member {
  RollCall rank;
  std::deque<StoreAction> pending = {};
  Seen seen = {};
  double due = 0;
  size_t num_actions = 0;
  size_t dies_at = SIZE_MAX;  // before which of its actions
  double goes_on_at = 0;      // where it is stopped: when it goes on
  std::optional<double> ended = std::nullopt;

  bool is_dead() const { return num_actions >= dies_at; }

  // Acts until it waits, ends or dies.
  void act(double now, Store& store) {
    while (!ended && !is_dead()) {
      if (pending.empty()) {
        for (StoreAction& action : rank.next(now, seen)) pending.push_back(std::move(action));
        seen = {};
      }
      const StoreAction action = pending.front();
      pending.pop_front();
      ++num_actions;
      if (action.kind == Kind::kEnd) ended = now;
      if (action.kind == Kind::kWait) {
        due = now + (rank.has_work() ? 0 : action.seconds);
        return;
      }
      seen = store.perform(action);
    }
  }
};

struct Case {
  std::string name;
  int64_t num_ranks = 3;
  std::vector<int64_t> callers = {0};
  std::vector<int64_t> dead = {};     // from the beginning
  std::vector<int64_t> stopped = {};  // until 100 s
  std::vector<int64_t> at_work = {};
  size_t caller_dies_at = SIZE_MAX;
  std::vector<int64_t> silent = {};
  std::vector<int64_t> late = {};
};

std::vector<Member> run(const Case& one) {
  std::vector<Member> members;
  for (int64_t rank = 0; rank < one.num_ranks; ++rank) members.push_back({make_rank(rank, one.num_ranks)});
  const auto of = [&](int64_t rank) -> Member& { return members[static_cast<size_t>(rank)]; };
  for (Member& member : members) member.rank.wait(2);
  for (const int64_t rank : one.at_work) of(rank).rank.begin(2, "write", "ranks wrote");
  for (const int64_t rank : one.dead) of(rank).dies_at = 0;
  for (const int64_t rank : one.stopped) of(rank).due = 100;
  for (const int64_t rank : one.callers) {
    of(rank).rank.call("rank " + std::to_string(rank) + " waited", true);
    of(rank).dies_at = one.caller_dies_at;
  }
  Store store;
  for (int round = 0; round < 100'000; ++round) {
    Member* next = nullptr;
    for (Member& member : members) {
      if (!member.ended && !member.is_dead() && (next == nullptr || member.due < next->due)) next = &member;
    }
    if (next == nullptr) return members;
    next->act(next->due, store);
  }
  ADD_FAILURE() << one.name << ": it has no end";
  return members;
}

void check(const Case& one) {
  SCOPED_TRACE(one.name);
  for (const Member& member : run(one)) {
    if (member.is_dead()) continue;
    ASSERT_TRUE(member.rank.verdict());
    EXPECT_EQ(member.rank.verdict()->silent, one.silent);
    std::vector<int64_t> late;
    for (const auto& [rank, _] : member.rank.verdict()->late) late.push_back(rank);
    EXPECT_EQ(late, one.late);
  }
}

TEST(RollCallOfGroups, AllRanksRaiseTheSame) {
  const std::vector<Case> cases = {
      {.name = "one rank alone", .num_ranks = 1},
      {.name = "all wait", .num_ranks = 3},
      {.name = "one is at work", .at_work = {1}, .late = {1}},
      {.name = "all but the caller are at work",
       .num_ranks = 8,
       .callers = {7},
       .at_work = {0, 1, 2, 3, 4, 5, 6},
       .late = {0, 1, 2, 3, 4, 5, 6}},
      {.name = "one is dead", .dead = {1}, .silent = {1}},
      {.name = "one is stopped, and goes on", .stopped = {1}, .silent = {1}},
      {.name = "rank 0 is dead", .callers = {2}, .dead = {0}, .silent = {0}},
      {.name = "rank 0 is stopped, and goes on", .callers = {2}, .stopped = {0}, .silent = {0}},
      {.name = "two are lost, one is at work",
       .num_ranks = 8,
       .callers = {3},
       .dead = {1},
       .stopped = {6},
       .at_work = {2},
       .silent = {1, 6},
       .late = {2}},
      {.name = "two callers", .callers = {1, 2}},
      {.name = "all call", .callers = {0, 1, 2}},
      {.name = "all of many call, one is dead", .num_ranks = 64, .callers = {0, 5, 63}, .dead = {9}, .silent = {9}},
      {.name = "the caller has called and answered", .caller_dies_at = 3},
      {.name = "the caller has called", .caller_dies_at = 2, .silent = {0}},
  };
  for (const Case& one : cases) check(one);
}

TEST(RollCallOfGroups, CallersMayDieAtAnyOfTheirActions) {
  for (size_t action = 1; action < 60; ++action) {
    SCOPED_TRACE(action);
    Case one{.name = "callers die", .num_ranks = 4, .callers = {2, 3}, .dead = {1}};
    one.caller_dies_at = action;
    const std::vector<Member> members = run(one);
    ASSERT_TRUE(members[0].rank.verdict());
    EXPECT_EQ(members[0].rank.verdict()->silent.front(), 1);
    for (const Member& member : members) {
      if (!member.rank.verdict()) continue;
      EXPECT_EQ(member.rank.verdict()->silent, members[0].rank.verdict()->silent);
    }
  }
}

TEST(RollCallOfGroups, Rank0IsTheLastWhoEnds) {
  for (const int64_t num_ranks : {1, 2, 8, 64}) {
    const std::vector<Member> members = run({"the last rank calls", num_ranks, {num_ranks - 1}});
    for (const Member& member : members) {
      ASSERT_TRUE(member.ended);
      EXPECT_LE(*member.ended, *members[0].ended);
    }
    EXPECT_LE(*members[0].ended, kRollCallSeconds);  // it waits for nobody who has heard
  }
}

}  // namespace
}  // namespace torchtitan_ext::core
