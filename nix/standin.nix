# What of nixpkgs the module and the package use, as little as the test needs: there is no nixpkgs where it runs. It evaluates options
# with their types, mkIf, and what the module defines; it does not merge modules, and it builds nothing.
let
  inherit (builtins)
    all
    attrNames
    attrValues
    elem
    filter
    isAttrs
    isBool
    isFloat
    isInt
    isList
    isString
    listToAttrs
    mapAttrs
    ;

  type = name: check: { inherit name check; };
  value = v: isBool v || isInt v || isFloat v || isString v || (isList v && all value v) || (isAttrs v && all value (attrValues v));

  lib = rec {
    types = {
      bool = type "boolean" isBool;
      package = type "package" (v: (v.type or null) == "derivation");
      attrsOf = t: type "attribute set of ${t.name}" (v: isAttrs v && all t.check (attrValues v));
      nullOr = t: type "null or ${t.name}" (v: v == null || t.check v);
    };
    mkOption = option: option // { _type = "option"; };
    mkEnableOption = description: mkOption {
      type = types.bool;
      default = false;
      inherit description;
    };
    mkIf = condition: content: { _type = "if"; inherit condition content; };
    literalExpression = text: { inherit text; };
    genAttrs = names: f: listToAttrs (map (name: { inherit name; value = f name; }) names);
    cleanSource = path: path;
    licenses.asl20 = "Apache-2.0";
  };

  package = name: {
    type = "derivation";
    inherit name;
    outPath = "/nix/store/stand-in-${name}";
    __toString = self: self.outPath;
  };

  pkgs = {
    buildGoModule = args: package "berth" // { inherit args; };
    callPackage = path: args: import path ({ inherit lib; inherit (pkgs) buildGoModule; } // args);
    runCommand = name: env: script: package name // env // { inherit script; };
    formats.toml = { }: {
      type = type "TOML value" value;
      generate = name: content: package name // { inherit content; };
    };
  };

  # mkIf, wherever it stands.
  resolve =
    v:
    if !isAttrs v || v ? outPath then
      v
    else if (v._type or null) == "if" then
      if v.condition then resolve v.content else null
    else
      let
        all = mapAttrs (_: resolve) v;
      in
      listToAttrs (map (name: { inherit name; value = all.${name}; }) (filter (name: all.${name} != null) (attrNames all)));
in
{
  inherit pkgs;

  # Evaluates a module whose options are all in options.services.NAME with a user's values for these.
  eval =
    module: name: user:
    let
      declared = (import module { inherit lib pkgs; config = { }; }).options.services.${name};
      unknown = filter (key: !(elem key (attrNames declared))) (attrNames user);
      check =
        key: option:
        let
          v = user.${key} or option.default;
        in
        if option.type.check v then v else throw "services.${name}.${key}: want ${option.type.name}";
      checked =
        if unknown != [ ] then throw "services.${name}: no option ${toString unknown}" else mapAttrs check declared;
    in
    resolve (import module { inherit lib pkgs; config.services.${name} = checked; }).config;
}
