//! The places of a source file that can be mutated.

use std::ops::Range;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Block, Expr, Lit, Pat, Stmt};

use crate::modules::is_for_tests;

/// What a mutation changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// The condition of `if` or `while` is negated.
    Condition,
    /// The guard of an arm of `match` is negated.
    Guard,
    /// `==` and `!=`.
    Equality,
    /// `<` and `<=`, `>` and `>=`.
    Boundary,
    /// `&&` and `||`.
    Logic,
    /// A number plus one.
    Number,
    /// `true` and `false`, where they are a result or the value of a field.
    Truth,
    /// A call with no result in use is left out.
    Call,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Condition => "condition",
            Kind::Guard => "guard",
            Kind::Equality => "equality",
            Kind::Boundary => "boundary",
            Kind::Logic => "logic",
            Kind::Number => "number",
            Kind::Truth => "truth",
            Kind::Call => "call",
        }
    }
}

/// A part of the text that is replaced: what it becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The opposite of a whole condition.
    Negate,
    /// Another operator between two operands.
    Operator { left: Range<usize>, operator: Range<usize>, new: &'static str, right: Range<usize> },
    /// Another literal.
    Literal(String),
    /// Nothing.
    Remove,
}

/// A place that can be mutated. Offsets are bytes.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) kind: Kind,
    pub(crate) range: Range<usize>,
    pub(crate) change: Change,
}

impl Site {
    /// The text of the range with the mutation, as a person would write it.
    pub(crate) fn plain(&self, text: &str) -> String {
        let own = &text[self.range.clone()];
        match &self.change {
            Change::Negate => negated(own),
            Change::Operator { operator, new, .. } => {
                format!(
                    "{}{new}{}",
                    &text[self.range.start..operator.start],
                    &text[operator.end..self.range.end]
                )
            }
            Change::Literal(new) => new.clone(),
            Change::Remove => String::new(),
        }
    }

    /// The text of the range with the mutation for the case that the mutation with this number is active.
    pub(crate) fn switched(&self, text: &str, number: usize) -> String {
        let own = &text[self.range.clone()];
        let active = format!("crate::mutation({number})");
        match &self.change {
            Change::Negate => format!("{active} != ({own})"),
            // Evaluated once: some values can be compared only once.
            Change::Operator { .. } if self.kind == Kind::Equality => format!("({active} != ({own}))"),
            // The brackets keep `a as usize < b` from being generic arguments.
            Change::Operator { left, operator, new, right } => {
                let (left, right) = (&text[left.clone()], &text[right.clone()]);
                let old = &text[operator.clone()];
                format!("(if {active} {{ ({left}) {new} ({right}) }} else {{ ({left}) {old} ({right}) }})")
            }
            Change::Literal(_) if own == "true" => format!("!{active}"),
            Change::Literal(_) if own == "false" => active,
            Change::Literal(new) => format!("(if {active} {{ {new} }} else {{ {own} }})"),
            Change::Remove => format!("if !{active} {{ {own} }}"),
        }
    }

    /// The part by which the line of the mutation is named.
    pub(crate) fn anchor(&self) -> Range<usize> {
        match &self.change {
            Change::Operator { operator, .. } => operator.clone(),
            _ => self.range.clone(),
        }
    }
}

/// The opposite of a condition, in short.
fn negated(condition: &str) -> String {
    match syn::parse_str(condition) {
        Ok(Expr::Unary(unary)) if matches!(unary.op, syn::UnOp::Not(_)) => {
            condition[range(unary.expr.span())].to_owned()
        }
        Ok(Expr::Path(_) | Expr::Call(_) | Expr::MethodCall(_) | Expr::Field(_) | Expr::Macro(_)) => {
            format!("!{condition}")
        }
        _ => format!("!({condition})"),
    }
}

/// All sites of a source file.
pub(crate) fn of_text(text: &str) -> Result<Vec<Site>, String> {
    let file = syn::parse_file(text).map_err(|error| error.to_string())?;
    let mut finder = Finder { text, sites: Vec::new() };
    finder.visit_file(&file);
    Ok(finder.sites)
}

/// Types whose text does not decide what the agent does.
const TEXT_TRAITS: &[&str] = &["Display", "Debug", "Error"];

const LOG_MACROS: &[&str] = &["error", "warn", "info", "debug", "trace", "log"];

/// Methods whose absence changes nothing that a caller sees.
const WITHOUT_EFFECT: &[&str] = &["reserve", "shrink_to_fit", "drop", "forget", "yield_now"];

/// Methods of metrics.
const METRIC_METHODS: &[&str] = &["inc", "add", "observe", "set"];

/// Calls with numbers that no test should depend on: lengths of time, and capacities.
const FREE_NUMBERS: &[&str] =
    &["Duration", "with_capacity", "from_secs", "from_millis", "from_micros", "from_nanos", "from_mins"];

struct Finder<'a> {
    text: &'a str,
    sites: Vec<Site>,
}

fn range(span: Span) -> Range<usize> {
    span.byte_range()
}

/// Whether a condition binds variables: these are not negated.
fn binds(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) => binds(&binary.left) || binds(&binary.right),
        _ => false,
    }
}

/// Whether a block does nothing but log.
fn only_logs(block: &Block) -> bool {
    let is_log = |statement: &Stmt| {
        let path = match statement {
            Stmt::Macro(call) => &call.mac.path,
            Stmt::Expr(Expr::Macro(call), _) => &call.mac.path,
            _ => return false,
        };
        path.segments.last().is_some_and(|segment| LOG_MACROS.iter().any(|name| segment.ident == name))
    };
    !block.stmts.is_empty() && block.stmts.iter().all(is_log)
}

impl Finder<'_> {
    fn add(&mut self, kind: Kind, range: Range<usize>, change: Change) {
        self.sites.push(Site { kind, range, change });
    }

    fn source(&self, spanned: &impl Spanned) -> &str {
        &self.text[range(spanned.span())]
    }

    fn condition(&mut self, kind: Kind, condition: &Expr) {
        let is_other_site = matches!(condition, Expr::Binary(binary) if swapped(&binary.op).is_some_and(|(kind, _)| kind == Kind::Equality));
        let constant = matches!(condition, Expr::Lit(_));
        let logs = self.source(condition).contains("log_enabled");
        if !binds(condition) && !is_other_site && !constant && !logs {
            self.add(kind, range(condition.span()), Change::Negate);
        }
    }

    /// A result or the value of a field.
    fn result(&mut self, expression: &Expr) {
        if let Expr::Lit(literal) = expression
            && let Lit::Bool(value) = &literal.lit
        {
            let new = (!value.value).to_string();
            self.add(Kind::Truth, range(literal.span()), Change::Literal(new));
        }
    }

    fn statement(&mut self, whole: Range<usize>, expression: &Expr) {
        let call = match expression {
            Expr::Try(question) => &*question.expr,
            other => other,
        };
        let name = match call {
            Expr::Call(call) => match &*call.func {
                Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
                _ => None,
            },
            Expr::MethodCall(call) => Some(call.method.to_string()),
            _ => return,
        };
        let name = name.unwrap_or_default();
        let text = self.source(expression);
        let is_static = text.split(['.', '(']).next().is_some_and(|root| {
            let root = root.rsplit("::").next().unwrap_or_default();
            root.len() > 1 && !root.chars().any(char::is_lowercase)
        });
        let is_metric = text.contains("metrics::") || (is_static && METRIC_METHODS.contains(&name.as_str()));
        let counts_writes = text.starts_with("disk_writes::") || text.contains("::disk_writes::");
        if !WITHOUT_EFFECT.contains(&name.as_str())
            && !is_metric
            && !counts_writes
            && !text.starts_with("log::")
        {
            self.add(Kind::Call, whole, Change::Remove);
        }
    }
}

/// The operator that replaces another.
fn swapped(operator: &BinOp) -> Option<(Kind, &'static str)> {
    Some(match operator {
        BinOp::Eq(_) => (Kind::Equality, "!="),
        BinOp::Ne(_) => (Kind::Equality, "=="),
        BinOp::Lt(_) => (Kind::Boundary, "<="),
        BinOp::Le(_) => (Kind::Boundary, "<"),
        BinOp::Gt(_) => (Kind::Boundary, ">="),
        BinOp::Ge(_) => (Kind::Boundary, ">"),
        BinOp::And(_) => (Kind::Logic, "||"),
        BinOp::Or(_) => (Kind::Logic, "&&"),
        _ => return None,
    })
}

impl<'ast> Visit<'ast> for Finder<'_> {
    // Numbers in these are constants of the compiler.
    fn visit_pat(&mut self, _: &'ast Pat) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}
    fn visit_generics(&mut self, _: &'ast syn::Generics) {}
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}

    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !is_for_tests(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        if !is_for_tests(&function.attrs) && function.sig.constness.is_none() {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_for_tests(&function.attrs) && function.sig.constness.is_none() {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if !is_for_tests(&function.attrs) && function.sig.constness.is_none() {
            visit::visit_trait_item_fn(self, function);
        }
    }

    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        let name = block.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
        let is_text = name.is_some_and(|name| TEXT_TRAITS.iter().any(|text| name.ident == text));
        if !is_for_tests(&block.attrs) && !is_text {
            visit::visit_item_impl(self, block);
        }
    }

    fn visit_block(&mut self, block: &'ast Block) {
        if let Some(Stmt::Expr(last, None)) = block.stmts.last() {
            self.result(last);
        }
        visit::visit_block(self, block);
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        match statement {
            Stmt::Expr(expression, Some(end)) => {
                let whole = range(expression.span()).start..range(end.span()).end;
                self.statement(whole, expression);
            }
            Stmt::Local(local) => {
                if is_for_tests(&local.attrs) {
                    return;
                }
                if let (Pat::Wild(_), Some(init)) = (&local.pat, &local.init)
                    && init.diverge.is_none()
                {
                    self.statement(range(local.span()), &init.expr);
                }
            }
            _ => {}
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            self.condition(Kind::Guard, guard);
        }
        self.result(&arm.body);
        visit::visit_arm(self, arm);
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        self.result(&field.expr);
        visit::visit_field_value(self, field);
    }

    fn visit_expr_return(&mut self, value: &'ast syn::ExprReturn) {
        if let Some(value) = &value.expr {
            self.result(value);
        }
        visit::visit_expr_return(self, value);
    }

    fn visit_expr_closure(&mut self, closure: &'ast syn::ExprClosure) {
        self.result(&closure.body);
        visit::visit_expr_closure(self, closure);
    }

    fn visit_expr_if(&mut self, branch: &'ast syn::ExprIf) {
        if branch.else_branch.is_none() && only_logs(&branch.then_branch) {
            return;
        }
        self.condition(Kind::Condition, &branch.cond);
        visit::visit_expr_if(self, branch);
    }

    fn visit_expr_while(&mut self, repetition: &'ast syn::ExprWhile) {
        self.condition(Kind::Condition, &repetition.cond);
        visit::visit_expr_while(self, repetition);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let name = self.source(&*call.func).to_owned();
        if !FREE_NUMBERS.iter().any(|free| name.contains(free)) {
            visit::visit_expr_call(self, call);
        }
    }

    fn visit_expr_binary(&mut self, binary: &'ast syn::ExprBinary) {
        let whole = range(binary.span());
        if let Some((kind, new)) = swapped(&binary.op)
            && !binds(&binary.left)
            && !binds(&binary.right)
        {
            let (left, right) = (range(binary.left.span()), range(binary.right.span()));
            let operator = range(binary.op.span());
            self.add(kind, whole, Change::Operator { left, operator, new, right });
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_lit(&mut self, literal: &'ast syn::ExprLit) {
        let Lit::Int(number) = &literal.lit else { return };
        let Ok(value) = number.base10_parse::<u64>() else { return };
        let new = format!("{}{}", u128::from(value) + 1, number.suffix());
        self.add(Kind::Number, range(literal.span()), Change::Literal(new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mutations of a function body: the mutated text of each.
    fn mutations(body: &str) -> Vec<String> {
        let text = format!("fn f() {{ {body} }}");
        let inside = |site: &Site| (site.kind.name(), site.plain(&text));
        of_text(&text).unwrap().iter().map(inside).map(|(kind, new)| format!("{kind}: {new}")).collect()
    }

    #[test]
    fn each_kind_is_found() {
        assert_eq!(mutations("if a { b }"), ["condition: !a"]);
        assert_eq!(mutations("while a.b() {}"), ["condition: !a.b()"]);
        assert_eq!(mutations("if !a {}"), ["condition: a"]);
        assert_eq!(mutations("if a as bool {}"), ["condition: !(a as bool)"]);
        assert_eq!(mutations("match a { b if c => d, _ => e }"), ["guard: !c"]);
        assert_eq!(mutations("let a = b == c;"), ["equality: b != c"]);
        assert_eq!(mutations("let a = b < c || d;"), ["logic: b < c && d", "boundary: b <= c"]);
        assert_eq!(mutations("let a = 9u8;"), ["number: 10u8"]);
        assert_eq!(mutations("let a = A { b: true };"), ["truth: false"]);
        assert_eq!(mutations("return false;"), ["truth: true"]);
        assert_eq!(mutations("a.b(c); let _ = d();"), ["call: ", "call: "]);
    }

    #[test]
    fn comparison_is_negated_once() {
        assert_eq!(mutations("if a == b { c }"), ["equality: a != b"]);
    }

    #[test]
    fn conditions_that_bind_variables_stay() {
        assert_eq!(mutations("if let A(a) = b && c { d }"), Vec::<String>::new());
    }

    #[test]
    fn logs_metrics_constants_and_patterns_stay() {
        for body in [
            "log::warn!(\"a {}\", 1);",
            "if a > 1 { log::warn!(\"a\"); }",
            "metrics::STARTED.inc();",
            "STARTED.add(a, b);",
            "disk_writes::created(a);",
            "drop(a);",
            "const A: u8 = 1;",
            "let a = [b; 4];",
            "let a: [u8; 4] = b;",
            "let a = b::<4>;",
            "let a = Duration::from_secs(4);",
            "match a { 1 => b, _ => c }",
            "#[cfg(test)] mod a { fn b() { c(1); } }",
            "const fn a() -> u8 { 1 }",
            "impl fmt::Display for A { fn fmt(&self) { a.b(1); } }",
        ] {
            assert_eq!(mutations(body), Vec::<String>::new(), "{body}");
        }
    }

    #[test]
    fn switched_text_has_both_variants() {
        let switched = |body: &str| {
            let text = format!("fn f() {{ {body} }}");
            let sites = of_text(&text).unwrap();
            sites.first().map(|site| site.switched(&text, 7)).unwrap()
        };
        assert_eq!(switched("if a { b }"), "crate::mutation(7) != (a)");
        assert_eq!(switched("let a = b == c;"), "(crate::mutation(7) != (b == c))");
        assert_eq!(
            switched("let a = b as u8 <= c;"),
            "(if crate::mutation(7) { (b as u8) < (c) } else { (b as u8) <= (c) })"
        );
        assert_eq!(switched("let a = 0xff;"), "(if crate::mutation(7) { 256 } else { 0xff })");
        assert_eq!(switched("return true;"), "!crate::mutation(7)");
        assert_eq!(switched("a.b()?;"), "if !crate::mutation(7) { a.b()?; }");
    }
}
