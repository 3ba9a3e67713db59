//! Turns `proto/*.proto` into Rust without `protoc`: messages (by protobuf-codegen's own
//! parser), the client's method table, and, for the integration tests only, server stubs
//! and a JSON view of the messages.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const PROTOS: &[&str] = &[
    "proto/csi.proto",
    "proto/deviceplugin.proto",
    "proto/dra.proto",
    "proto/drahealth.proto",
    "proto/imagestore.proto",
    "proto/pluginregistration.proto",
    "proto/podresources.proto",
    "proto/pods.proto",
    "proto/runtime.proto",
    "proto/snapshots.proto",
    "proto/traces.proto",
];
/// The file for which tests get server stubs and a JSON view.
const FAKED: &str = "runtime";

// Field types as descriptor.proto numbers them.
const TYPE_INT64: i32 = 3;
const TYPE_UINT64: i32 = 4;
const TYPE_MESSAGE: i32 = 11;
const TYPE_BYTES: i32 = 12;
const TYPE_ENUM: i32 = 14;
const LABEL_REPEATED: i32 = 3;

fn main() {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));

    let customize = protobuf_codegen::Customize::default()
        // No reflection tables in the binary, and maps with one order on the wire.
        .lite_runtime(true)
        .btreemaps(true)
        .generate_accessors(false)
        .gen_mod_rs(true);
    protobuf_codegen::Codegen::new()
        .pure()
        .include("proto")
        .inputs(PROTOS)
        .customize(customize)
        .cargo_out_dir("proto")
        .run_from_script();

    let parsed = protobuf_parse::Parser::new()
        .pure()
        .include("proto")
        .inputs(PROTOS)
        .parse_and_typecheck()
        .expect("the messages were parsed a moment ago");

    let (mut methods, mut service, mut json) = (String::new(), String::new(), String::new());
    for file in &parsed.file_descriptors {
        let module =
            Path::new(file.name()).file_stem().and_then(|stem| stem.to_str()).expect("a .proto name");
        // Methods of two files may have one name: each file has a module. Names that only one file
        // uses are also in the parent.
        if !file.service.is_empty() {
            writeln!(methods, "pub mod {module} {{\nuse super::super::{module};\nuse crate::transport::grpc::{{StreamingMethod, UnaryMethod}};").expect("a String grows");
        }
        for service_type in &file.service {
            let service_name = service_type.name();
            let mut add = String::new();
            let mut handlers = String::new();
            for method in &service_type.method {
                let name = method.name();
                let (snake, shout) = (snake(name), snake(name).to_uppercase());
                let request = last(method.input_type());
                let response = last(method.output_type());
                let streaming = method.server_streaming();
                let path = format!("/{}.{service_name}/{name}", file.package());
                let (wrapper, kind, handler, sink) = if streaming {
                    ("StreamingMethod", "ServerStreaming", "server_streaming", "ServerStreamingSink")
                } else {
                    ("UnaryMethod", "Unary", "unary", "UnarySink")
                };
                let value = format!(
                    "grpcio::Method {{ ty: grpcio::MethodType::{kind}, name: {path:?}, \
                     req_mar: grpcio::Marshaller {{ ser: grpcio::pb_ser, de: grpcio::pb_de }}, \
                     resp_mar: grpcio::Marshaller {{ ser: grpcio::pb_ser, de: grpcio::pb_de }} }}"
                );
                let types = format!("<{module}::{request}, {module}::{response}>");
                writeln!(
                    methods,
                    "pub static {shout}: {wrapper}{types} = {wrapper} {{ name: {name:?}, method: {value} }};"
                )
                .expect("a String grows");
                writeln!(
                    handlers,
                    "    fn {snake}(&mut self, ctx: grpcio::RpcContext, _request: {module}::{request}, \
                     sink: grpcio::{sink}<{module}::{response}>) {{ grpcio::unimplemented_call!(ctx, sink) }}"
                )
                .expect("a String grows");
                writeln!(
                    add,
                    "    let mut instance = service.clone();\n    \
                     static {shout}: grpcio::Method{types} = {value};\n    \
                     builder = builder.add_{handler}_handler(&{shout}, \
                     move |ctx, request, sink| instance.{snake}(ctx, request, sink));"
                )
                .expect("a String grows");
            }
            if module != FAKED {
                continue;
            }
            writeln!(
                service,
                "pub trait {service_name} {{\n{handlers}}}\n\n\
                 pub fn create_{}<S: {service_name} + Send + Clone + 'static>(service: S) -> grpcio::Service {{\n    \
                 let mut builder = grpcio::ServiceBuilder::new();\n{add}    builder.build()\n}}\n",
                snake(service_name)
            )
            .expect("a String grows");
        }
        if !file.service.is_empty() {
            writeln!(methods, "}}\npub use {module}::*;").expect("a String grows");
        }
        for message in file.message_type.iter().filter(|_| module == FAKED) {
            let mut body = String::new();
            for field in &message.field {
                let name = field.name();
                let rust = if name == "type" { "type_" } else { name };
                let kind = field.type_.map_or(0, |kind| kind.value());
                let repeated = field.label.is_some_and(|label| label.value() == LABEL_REPEATED);
                let is_map = kind == TYPE_MESSAGE
                    && message
                        .nested_type
                        .iter()
                        .any(|nested| nested.name() == last(field.type_name()) && nested.options.map_entry());
                let item_json = |value: &str| match kind {
                    TYPE_MESSAGE => format!("{value}.to_json()"),
                    TYPE_ENUM => format!("enum_json({value})"),
                    TYPE_BYTES => format!("bytes_json({value})"),
                    TYPE_INT64 | TYPE_UINT64 => format!("{value}.to_string().into()"),
                    _ => format!("{value}.clone().into()"),
                };
                let line = if is_map {
                    format!("map_json(&mut map, {name:?}, &self.{rust});")
                } else if repeated {
                    format!(
                        "if !self.{rust}.is_empty() {{ map.insert({name:?}.into(), \
                         Value::Array(self.{rust}.iter().map(|item| {}).collect())); }}",
                        item_json("item")
                    )
                } else if kind == TYPE_MESSAGE {
                    format!(
                        "if let Some(item) = self.{rust}.as_ref() {{ map.insert({name:?}.into(), {}); }}",
                        item_json("item")
                    )
                } else {
                    format!(
                        "if filled(&self.{rust}) {{ let item = &self.{rust}; \
                         map.insert({name:?}.into(), {}); }}",
                        item_json("item")
                    )
                };
                writeln!(body, "        {line}").expect("a String grows");
            }
            writeln!(
                json,
                "impl ToJson for {module}::{} {{\n    #[allow(unused_mut)]\n    \
                 fn to_json(&self) -> Value {{\n        let mut map = serde_json::Map::new();\n{body}        \
                 Value::Object(map)\n    }}\n}}",
                message.name()
            )
            .expect("a String grows");
        }
    }
    for (name, text) in [("methods.rs", methods), ("service.rs", service), ("json.rs", json)] {
        std::fs::write(out.join(name), text).expect("OUT_DIR can be written");
    }
}

/// `.runtime.v1.Mount` is `Mount`: all types in use are top-level ones.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// `StopPodSandbox` becomes `stop_pod_sandbox`.
fn snake(name: &str) -> String {
    let mut text = String::new();
    for (index, c) in name.chars().enumerate() {
        if c.is_ascii_uppercase() && index > 0 {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}
